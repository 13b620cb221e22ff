"""Blocks that finish a model: a forward model with outputs, or the models for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from ort_ops.training.onnxblock import _graph_utils, model_accessor
from ort_ops.training.onnxblock.blocks import Block
from ort_ops.training.training_graphs import TrainingGraphs, build_training_graphs


class ForwardBlock(Block):
    """A block whose results become the outputs of the model, which `to_model_proto` returns."""

    _model: onnx.ModelProto | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build, and make what `build` returns the model's outputs."""
        accessor = model_accessor.current()
        self.base = accessor.model
        with accessor.building():
            output = self.build(*args, **kwargs)
            _graph_utils.register_graph_outputs(accessor.model, output)
        self._model = accessor.model
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """The model that was built. Raises RuntimeError before the block was called."""
        if self._model is None:
            raise RuntimeError(
                f"{type(self).__name__}.to_model_proto: there is no model yet; call the block first."
            )
        return self._model


class TrainingBlock(Block):
    """A block whose first result is the loss, from which the models for training and evaluation are made.

    `requires_grad` chooses the parameters; without it every parameter that reaches the loss is trained.
    """

    _graphs: TrainingGraphs | None = None

    def __init__(self) -> None:
        super().__init__()
        self._requires_grad: dict[str, bool] = {}

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Train the parameter of this name, or those that match this pattern; with False, freeze it: it is an
        input of the models and stored in the checkpoint, but not changed."""
        self._requires_grad[argument_name] = value

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """The trained parameters and the frozen ones, with their first values. Raises RuntimeError before the
        block was called."""
        graphs = self._built("parameters")
        return list(graphs.trainable.values()), list(graphs.frozen.values())

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the eval model. Raises RuntimeError before the block was called."""
        graphs = self._built("to_model_proto")
        return graphs.training_model, graphs.eval_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build, and make the models from what `build` returns: the loss, or the loss and further outputs,
        which a Module returns after it."""
        accessor = model_accessor.current()
        self.base = accessor.model
        with accessor.building():
            output = self.build(*args, **kwargs)
        trained = [name for name, value in self._requires_grad.items() if value]
        frozen = [name for name, value in self._requires_grad.items() if not value]
        outputs: Sequence[str] = [output] if isinstance(output, str) else list(output)
        self._graphs = build_training_graphs(
            accessor.model,
            outputs,
            requires_grad=trained or None,
            frozen_params=frozen,
            constants=accessor.constants,
            returned=outputs[1:],
        )
        accessor.model = self._graphs.training_model
        return output

    def _built(self, method: str) -> TrainingGraphs:
        if self._graphs is None:
            raise RuntimeError(
                f"{type(self).__name__}.{method}: there are no models yet; call the block first."
            )
        return self._graphs
