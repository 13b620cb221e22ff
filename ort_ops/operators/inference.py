"""Shape and type inference of one node: what is known of its inputs, and sentences for what clashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import onnx
import onnx.helper
from onnx import shape_inference

Dims = Sequence[int | str | None]

_MAX_RANK = 8


class Inference:
    """A node's inputs by the names of their slots: `types` (ONNX's numbers) and `shapes`, where known.

    An axis of a shape is its length, its symbol, or None when nothing is known.
    """

    def __init__(self, context: shape_inference.InferenceContext, input_names: Sequence[str]) -> None:
        self._context = context
        self.types: dict[str, int] = {}
        self.shapes: dict[str, list[int | str | None]] = {}
        for index, name in enumerate(input_names):
            if index >= context.get_num_inputs() or not context.has_input(index):
                continue
            value_type = context.get_input_type(index)
            if value_type is None or not value_type.HasField("tensor_type"):
                continue
            tensor = value_type.tensor_type
            self.types[name] = tensor.elem_type
            if tensor.HasField("shape"):
                self.shapes[name] = _dims(tensor)

    def fail(self, rule: str, got: str) -> NoReturn:
        raise shape_inference.InferenceError(f"{self._context.get_display_name()}: {rule}; got {got}.")

    def check_rank(self, name: str, minimum: int = 1) -> None:
        shape = self.shapes.get(name)
        if shape is not None and not minimum <= len(shape) <= _MAX_RANK:
            self.fail(f"{name} must have rank {minimum} to {_MAX_RANK}", f"rank {len(shape)}")

    def check_same_shape(self, name: str, model: str) -> None:
        shape, expected = self.shapes.get(name), self.shapes.get(model)
        if shape is not None and expected is not None and not agree(shape, expected):
            self.fail(f"{name} must have {model}'s shape {text(expected)}", text(shape))

    def check_scalar(self, name: str) -> None:
        shape = self.shapes.get(name)
        if shape is not None and any(isinstance(dim, int) and dim != 1 for dim in shape):
            self.fail(f"{name} must have one element", text(shape))

    def attribute(self, name: str) -> str | None:
        """The value of a string attribute, None where the node does not set it."""
        attribute = self._context.get_attribute(name)
        return None if attribute is None else attribute.s.decode()

    def set_output(self, index: int, elem_type: int, dims: Dims | None) -> None:
        if index < self._context.get_num_outputs() and self._context.has_output(index):
            self._context.set_output_type(index, onnx.helper.make_tensor_type_proto(elem_type, dims))

    def set_output_like(self, index: int, name: str) -> None:
        """The output has the type and the shape of this input."""
        if name in self.types:
            self.set_output(index, self.types[name], self.shapes.get(name))


def _dims(tensor: Any) -> list[int | str | None]:
    """Each axis as its length, its symbol, or None when nothing is known."""
    return [
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None) for dim in tensor.shape.dim
    ]


def agree(left: Dims, right: Dims) -> bool:
    """Whether the two can be one shape: only two known, different lengths say no."""
    return len(left) == len(right) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(left, right, strict=True)
    )


def text(dims: Dims) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"
