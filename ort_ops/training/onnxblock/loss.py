"""The losses as blocks: from the name of a prediction to the name of the loss.

The target is the value named by the second argument. If the model has none of that name it becomes an input
of the model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir

from ort_ops.training import losses
from ort_ops.training.onnxblock import _graph_utils
from ort_ops.training.onnxblock.blocks import Block, InputLike


class _TargetLoss(Block):
    """A loss of a prediction and a target of the same shape and type."""

    def __init__(self, reduction: str, build: Callable[..., ir.Value]) -> None:
        super().__init__()
        _check_reduction(type(self).__name__, reduction)
        self._write = partial(build, reduction=reduction)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        if not _graph_utils.node_arg_exists(self.base, target_name):
            InputLike(loss_input_name)(target_name)
        return _graph_utils.add_graph("loss", [loss_input_name, target_name], self._write)


class MSELoss(_TargetLoss):
    """(prediction - target)^2, as torch.nn.MSELoss. reduction: "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction, losses.mse)


class L1Loss(_TargetLoss):
    """|prediction - target|, as torch.nn.L1Loss. reduction: "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(reduction, losses.l1)


class HuberLoss(_TargetLoss):
    """Quadratic up to a distance of `delta`, linear beyond, as torch.nn.HuberLoss. reduction: "mean", "sum"
    or "none"."""

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        if not delta > 0:
            raise ValueError(f"HuberLoss: delta must be positive; got {delta}.")
        super().__init__(reduction, partial(losses.huber, delta=delta))


class BCEWithLogitsLoss(_TargetLoss):
    """Binary cross entropy of logits, as torch.nn.BCEWithLogitsLoss, exact for logits of any size.

    weight: factors of the elements' losses, broadcast to their shape.
    reduction: "mean", "sum" or "none".
    pos_weight: factors of the positive examples, broadcast likewise (one per class on the last axis).
    """

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        pos_weight: np.ndarray | None = None,
    ) -> None:
        super().__init__(reduction, partial(losses.bce_with_logits, weight=weight, pos_weight=pos_weight))


class CrossEntropyLoss(Block):
    """Cross entropy of class scores and labels, as torch.nn.CrossEntropyLoss with class indices.

    weight: one factor per class.
    reduction: "mean", "sum" or "none".
    ignore_index: the label of rows without a loss; None means PyTorch's -100.
    label_smoothing: share of the target that is spread over all classes evenly, from 0 to 1.
    class_axis: the axis of the scores that counts the classes, 1 or the last. None asks the labels, if the
        model knows their shape: (B, T, V) scores with (B, T) labels have V classes, with (B, V) labels T. For
        labels that become a new input: the last axis of scores of rank 2 and 3, else axis 1.

    A label that is neither a class nor `ignore_index` makes the run fail.
    """

    def __init__(
        self,
        weight: np.ndarray | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        class_axis: int | None = None,
    ) -> None:
        super().__init__()
        _check_reduction("CrossEntropyLoss", reduction)
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"CrossEntropyLoss: label_smoothing must be from 0 to 1; got {label_smoothing}.")
        self._weight = None if weight is None else np.asarray(weight)
        self._reduction = reduction
        self._ignore_index = losses.IGNORE_INDEX if ignore_index is None else ignore_index
        self._label_smoothing = label_smoothing
        self._class_axis = class_axis

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        scores = _graph_utils.value_info(self.base, scores_input_name).type
        dims = _dims(scores_input_name, scores)
        if len(dims) < 2:
            raise ValueError(
                f"CrossEntropyLoss: the scores {scores_input_name!r} must have an axis of rows and one of "
                f"classes; got {_shown(dims)}."
            )
        if _graph_utils.node_arg_exists(self.base, labels_name):
            labels = _dims(labels_name, _graph_utils.value_info(self.base, labels_name).type)
            axis = self._class_axis_of(scores_input_name, dims, labels_name, labels)
        else:
            axis = self._class_axis_of(scores_input_name, dims, labels_name, None)
            kind = onnx.helper.make_tensor_type_proto(
                onnx.TensorProto.INT64, [*dims[:axis], *dims[axis + 1 :]]
            )
            _graph_utils.new_input(self.base, labels_name, kind)
        self._check_weight(scores_input_name, dims[axis])
        self._note_check(labels_name, dims[axis])
        write = partial(
            losses.cross_entropy,
            class_axis=axis,
            weight=self._weight,
            ignore_index=self._ignore_index,
            reduction=self._reduction,
            label_smoothing=self._label_smoothing,
        )
        return _graph_utils.add_graph("loss", [scores_input_name, labels_name], write)

    def _class_axis_of(self, scores_name: str, scores: _Dims, labels_name: str, labels: _Dims | None) -> int:
        last = len(scores) - 1
        if self._class_axis is not None:
            axis = self._class_axis + len(scores) if self._class_axis < 0 else self._class_axis
            if axis not in (1, last):
                raise ValueError(
                    f"CrossEntropyLoss: class_axis must be 1 or the last axis of the scores {scores_name!r}, "
                    f"which is {last}; got {self._class_axis}."
                )
            return axis
        if labels is None:
            return last if last <= 2 else 1
        without = {axis: [*scores[:axis], *scores[axis + 1 :]] for axis in (last, 1)}
        for fits in (operator.eq, _may_be_equal):
            for axis, expected in without.items():
                if fits(expected, labels):
                    return axis
        raise ValueError(
            f"CrossEntropyLoss: the labels {labels_name!r} must have the shape of the scores {scores_name!r} "
            f"without axis 1 or without the last axis. The scores are {_shown(scores)}; got {_shown(labels)}."
        )

    def _check_weight(self, scores_name: str, classes: int | str | None) -> None:
        if self._weight is None:
            return
        if self._weight.ndim != 1 or (isinstance(classes, int) and self._weight.size != classes):
            count = classes if isinstance(classes, int) else "number of classes"
            raise ValueError(
                f"CrossEntropyLoss: weight must have the shape [{count}], one factor per class of the scores "
                f"{scores_name!r}; got {list(self._weight.shape)}."
            )

    def _note_check(self, labels_name: str, classes: int | str | None) -> None:
        """Let the run time know what the labels must be."""
        count = classes if isinstance(classes, int) else None
        if any(value.name == labels_name for value in self.base.graph.input):
            metadata = {entry.key: entry.value for entry in self.base.metadata_props}
            check = losses.LabelCheck(labels_name, count, self._ignore_index)
            metadata[losses.LABELS_KEY] = losses.note_label_check(metadata, check)
            onnx.helper.set_model_props(self.base, metadata)


_Dims = list[int | str | None]


def _dims(name: str, kind: onnx.TypeProto) -> _Dims:
    """The sizes of a tensor: numbers, names, or None where nothing is known."""
    if not kind.tensor_type.HasField("shape"):
        raise ValueError(
            f"CrossEntropyLoss: the number of dimensions of {name!r} must be known; give the value a shape "
            "in the model."
        )
    dims = kind.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]


def _may_be_equal(expected: _Dims, got: _Dims) -> bool:
    """Whether two shapes have the same rank and no two sizes that are known to differ."""
    return len(expected) == len(got) and all(
        one == other or not (isinstance(one, int) and isinstance(other, int))
        for one, other in zip(expected, got, strict=True)
    )


def _shown(dims: _Dims) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in dims) + "]"


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in losses.REDUCTIONS:
        raise ValueError(
            f"{name}: reduction must be one of {', '.join(map(repr, losses.REDUCTIONS))}; got {reduction!r}."
        )
