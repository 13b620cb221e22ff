"""Adding the gradients of one more batch to those there are, on the device and in place."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnxruntime as ort
from onnx import helper

from ort_ops.training.api.checkpoint_state import TrainingState
from ort_ops.training.api.session import Session
from ort_ops.training.api.tensor import Tensor
from ort_ops.training.optimizer import GRADIENT_SUFFIX, UPDATED_SUFFIX

_OPSET = 18
_IR_VERSION = 9
_MORE = "_more"


class Accumulation:
    """Adds to the gradients of `state`."""

    def __init__(self, state: TrainingState, options: ort.SessionOptions) -> None:
        self._gradients = {name + GRADIENT_SUFFIX: tensor for name, tensor in state.gradients.items()}
        self._session = Session(_model(self._gradients), state.device, options)

    def add(self, more: Mapping[str, ort.OrtValue]) -> None:
        """Add those of `more` that are gradients (`<parameter>_grad`) to the gradients."""
        sums = {name: tensor.value for name, tensor in self._gradients.items()}
        self._session.run(
            {**sums, **{name + _MORE: more[name] for name in sums}},
            {name + UPDATED_SUFFIX: value for name, value in sums.items()},
        )


def _model(gradients: Mapping[str, Tensor]) -> onnx.ModelProto:
    """One Add for each gradient. An Add reads an element before it writes that element, so its sum may lie
    where its addend does.
    """
    nodes = [helper.make_node("Add", [name, name + _MORE], [name + UPDATED_SUFFIX]) for name in gradients]

    def infos(suffix: str) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(
                name + suffix, helper.np_dtype_to_tensor_dtype(tensor.dtype), tensor.shape
            )
            for name, tensor in gradients.items()
        ]

    graph = helper.make_graph(
        nodes, "accumulate_gradients", [*infos(""), *infos(_MORE)], infos(UPDATED_SUFFIX)
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="ort_ops")
