"""The optimizers as blocks, with the names, defaults and formulas of onnxruntime.training.onnxblock.optim.

`AdamW` and `SGD` make an optimizer model from a model's parameters. `AdamWOptimizer`, `SGDOptimizer` and
`ClipGradNorm` add the nodes that onnxruntime-training has for sequences of tensors, for own blocks that
arrange them; no other runtime has these operators, so `rule_of` reads from the nodes what they do, and
`generate_artifacts` builds that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import onnx

from ort_ops.training.onnxblock import _graph_utils
from ort_ops.training.onnxblock.blocks import Block
from ort_ops.training.onnxblock.onnxblock import ForwardBlock
from ort_ops.training.optimizer import SGD as SGDRule
from ort_ops.training.optimizer import AdamW as AdamWRule
from ort_ops.training.optimizer import AdamWForm, LossScaling, UpdateRule, build_optimizer_model

Parameters = tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]
"""Trained and frozen parameters, as `TrainingBlock.parameters` returns them."""

_DOMAIN = "com.microsoft"
_ADAMW_NODE = "AdamWOptimizer"
_SGD_NODE = "SGDOptimizerV2"
_CLIP_NODE = "InplaceClipGradNorm"


# -- nodes ---------------------------------------------------------------------------------------------------


class ClipGradNorm(Block):
    """Scales gradients so that their L2 norm over all of them does not exceed `max_norm`."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = max_norm

    def build(self, gradients_name: str) -> str:
        name = _graph_utils.add_node(_CLIP_NODE, [gradients_name], domain=_DOMAIN, max_norm=self.max_norm)
        kind = onnx.helper.make_tensor_sequence_value_info(name, onnx.TensorProto.FLOAT, None)
        self.base.graph.value_info.append(kind)
        return name


class AdamWOptimizer(Block):
    """AdamW on sequences of tensors; see `AdamW`."""

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self._attributes: dict[str, float | int] = {
            "alpha": betas[0],
            "beta": betas[1],
            "epsilon": eps,
            "weight_decay": weight_decay,
            "correct_bias": int(bias_correction),
            "adam_mode": 1,
        }

    def build(
        self,
        learning_rate_name: str,
        step_name: str,
        parameter_sequence_name: str,
        gradient_sequence_name: str,
        first_order_moment_sequence_name: str,
        second_order_moment_sequence_name: str,
    ) -> str:
        inputs = [learning_rate_name, step_name, parameter_sequence_name, gradient_sequence_name]
        inputs += [first_order_moment_sequence_name, second_order_moment_sequence_name]
        return _graph_utils.add_node(_ADAMW_NODE, inputs, domain=_DOMAIN, **self._attributes)


class SGDOptimizer(Block):
    """Gradient descent on sequences of tensors."""

    def build(self, learning_rate_name: str, gradients_name: str, params_name: str) -> str:
        inputs = [learning_rate_name, gradients_name, params_name]
        return _graph_utils.add_node(_SGD_NODE, inputs, domain=_DOMAIN)


def rule_of(model: onnx.ModelProto) -> UpdateRule | None:
    """What the nodes of `AdamWOptimizer` or `SGDOptimizer`, and of `ClipGradNorm`, do; None if the model has
    none of them.

    Raises ValueError for a model that has other nodes too, or several optimizers.
    """
    nodes = {node.op_type: node for node in model.graph.node}
    kinds = [kind for kind in (_ADAMW_NODE, _SGD_NODE) if kind in nodes]
    if not kinds:
        return None
    if len(kinds) > 1 or len(nodes) < len(model.graph.node) or set(nodes) - {kinds[0], _CLIP_NODE}:
        raise ValueError(
            f"An optimizer model with a node of {kinds[0]} must have no others but {_CLIP_NODE}; it has "
            f"{', '.join(node.op_type for node in model.graph.node)}."
        )
    clip = _attributes(nodes[_CLIP_NODE])["max_norm"] if _CLIP_NODE in nodes else None
    if kinds == [_SGD_NODE]:
        return SGDRule(max_gradient_norm=clip)
    # What is left out has the default of the operator, not of the block.
    given = {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-8, "weight_decay": 1e-2} | _attributes(
        nodes[_ADAMW_NODE]
    )
    return AdamWRule(
        betas=(given["alpha"], given["beta"]),
        epsilon=given["epsilon"],
        weight_decay=given["weight_decay"],
        bias_correction=bool(given.get("correct_bias", 1)),
        form=AdamWForm.HUGGING_FACE if given.get("adam_mode", 0) else AdamWForm.PYTORCH,
        max_gradient_norm=clip,
    )


def _attributes(node: onnx.NodeProto) -> dict[str, float]:
    return {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}


# -- whole optimizers ----------------------------------------------------------------------------------------


class _Optimizer(ForwardBlock):
    def __init__(self, clip_grad: ClipGradNorm | None) -> None:
        super().__init__()
        if clip_grad is not None and not isinstance(clip_grad, ClipGradNorm):
            raise TypeError(
                f"{type(self).__name__}: clip_grad must be an onnxblock.optim.ClipGradNorm or None; got "
                f"{type(clip_grad).__name__}."
            )
        self._max_gradient_norm = None if clip_grad is None else clip_grad.max_norm

    @abstractmethod
    def _rule(self) -> UpdateRule:
        """What `build` builds."""

    def build(self, parameters: Parameters) -> list[str]:
        """Make the model of the surrounding `empty_base` the optimizer model of the trained parameters;
        returns the names of its outputs."""
        self.base.CopyFrom(optimizer_model(parameters[0], self._rule()))
        return [output.name for output in self.base.graph.output]


class AdamW(_Optimizer):
    """AdamW in the form of transformers and onnxruntime-training (`AdamWForm.HUGGING_FACE`).

    For PyTorch's form give `generate_artifacts` an `ort_ops.training.optimizer.AdamW` instead.
    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self._settings = AdamWRule(
            betas=betas,
            epsilon=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            form=AdamWForm.HUGGING_FACE,
            max_gradient_norm=self._max_gradient_norm,
        )

    def _rule(self) -> UpdateRule:
        return self._settings


class SGD(_Optimizer):
    """Gradient descent without momentum."""

    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        super().__init__(clip_grad)

    def _rule(self) -> UpdateRule:
        return SGDRule(max_gradient_norm=self._max_gradient_norm)


def optimizer_model(
    trainable: Sequence[onnx.TensorProto], rule: UpdateRule, scaling: LossScaling | None = None
) -> onnx.ModelProto:
    """The optimizer model of these parameters."""
    kinds = {tensor.name: (list(tensor.dims), tensor.data_type) for tensor in trainable}
    return build_optimizer_model(kinds, rule, loss_scaling=scaling)
