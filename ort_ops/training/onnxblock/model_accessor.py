"""The model that blocks are adding to: one at a time, for the length of a `with`."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import onnx
import onnx_ir as ir

from ort_ops.passes import PassError, upgrade_opset
from ort_ops.training.losses import FIRST_OPSET
from ort_ops.training.tensor_free import check

_NUMBERED = re.compile(r"^onnx::.*::(\d+)$")


class ModelAccessor:
    """Holds the model that blocks add to.

    Attributes:
        model: the model, as changed so far.
        constants: names of initializers that blocks added as constants, not to be trained.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.constants: set[str] = set()
        self._last_number = _highest_number(model)
        self._depth = 0

    def new_name(self, token: str) -> str:
        """A name that nothing in the model has."""
        self._last_number += 1
        return f"onnx::{token}::{self._last_number}"

    def free_name(self, token: str) -> str:
        """`token` itself, or a new name if something in the model has it."""
        graph = self.model.graph
        taken = {value.name for value in [*graph.input, *graph.initializer]}
        taken.update(name for node in graph.node for name in node.output)
        return self.new_name(token) if token in taken else token

    @contextmanager
    def building(self) -> Iterator[None]:
        """While a block builds. After the outermost one, onnx's checker sees the whole model once."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            check(self.model)


# Of the thread: several may build models at once.
_held_accessor: ContextVar[ModelAccessor | None] = ContextVar("accessor", default=None)
_named_library: ContextVar[str | None] = ContextVar("custom_op_library", default=None)


def current() -> ModelAccessor:
    """The accessor of the surrounding `with base(...)`. Raises RuntimeError outside of one."""
    accessor = _held_accessor.get()
    if accessor is None:
        raise RuntimeError(
            "onnxblock: blocks add to a model, and there is none; call them within 'with "
            "onnxblock.base(model):' or 'with onnxblock.empty_base():'."
        )
    return accessor


@contextmanager
def base(model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> Iterator[ModelAccessor]:
    """Let blocks add to a copy of `model`, which the accessor's `model` is.

    `model_path` is accepted for programs that pass it; no file is read or written. A model of an opset older
    than 12 is raised to 12, where the blocks' operators begin. Raises RuntimeError within another `base` or
    `empty_base`.
    """
    if not isinstance(model, onnx.ModelProto):
        raise RuntimeError(
            f"onnxblock.base: model must be an onnx.ModelProto; got {type(model).__name__}. To build a model "
            "from nothing use onnxblock.empty_base()."
        )
    with _held(ModelAccessor(_at_first_opset(model))) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Let blocks add to an empty model of this opset, by default the newest that onnx knows. Raises
    RuntimeError within another `base` or `empty_base`."""
    opset = opset_version or onnx.defs.onnx_opset_version()
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.ModelProto(producer_name="ort_ops", opset_import=imports)
    model.ir_version = onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    model.graph.name = "graph"
    with _held(ModelAccessor(model)) as accessor:
        yield accessor


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str]:
    """Name the library of custom operators that the model needs where it is run. Raises RuntimeError when
    there is no such file, and within another `custom_op_library`."""
    path = os.fspath(custom_op_library_path)
    if _named_library.get() is not None:
        raise RuntimeError(
            f"onnxblock.custom_op_library: '{_named_library.get()}' is in use; leave its 'with' first."
        )
    if not os.path.isfile(path):
        raise RuntimeError(f"onnxblock.custom_op_library: there is no library at '{path}'.")
    token = _named_library.set(path)
    try:
        yield path
    finally:
        _named_library.reset(token)


@contextmanager
def _held(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    if _held_accessor.get() is not None:
        raise RuntimeError(
            "onnxblock: blocks are adding to a model already; leave its 'with onnxblock.base(...)' before "
            "entering another, or build the other model first."
        )
    token = _held_accessor.set(accessor)
    try:
        yield accessor
    finally:
        _held_accessor.reset(token)


def _at_first_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    if any(entry.domain in ("", "ai.onnx") and entry.version < FIRST_OPSET for entry in model.opset_import):
        try:
            return ir.to_proto(upgrade_opset(ir.from_proto(model), FIRST_OPSET))
        except PassError as error:
            raise RuntimeError(f"onnxblock.base: {error}") from error
    return copy.deepcopy(model)


def _highest_number(model: onnx.ModelProto) -> int:
    names = [tensor.name for tensor in model.graph.initializer]
    names += [name for node in model.graph.node for name in (node.name, *node.output)]
    found = [int(match.group(1)) for name in names if (match := _NUMBERED.match(name))]
    return max(found, default=0)
