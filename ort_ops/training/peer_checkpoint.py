"""Reads the checkpoints of onnxruntime-training.

They are FlatBuffers with the file identifier ODTC; from about 2 GB on, the tensors' bytes are in a second
file beside it, `<checkpoint>.data`. The slots below are those of that format's schema,
`ort_training_checkpoint.fbs`, of format version 2, as onnxruntime-training 1.19 writes it; version 1 lacks
only the second file.

A file comes from anywhere, so no offset or length in it is believed: every read is checked against the
file's end.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from ort_ops.training.checkpoint import STEP, Checkpoint
from ort_ops.training.update_rules import FIRST_MOMENT_SUFFIX, SECOND_MOMENT_SUFFIX

IDENTIFIER = b"ODTC"
VERSIONS = (1, 2)
EXTERNAL_DATA_SUFFIX = ".data"

_MOMENT_SUFFIXES = {"momentum0": FIRST_MOMENT_SUFFIX, "momentum1": SECOND_MOMENT_SUFFIX}
"""The optimizer's state of a parameter, as the format calls it and as our optimizer models do."""

_TYPES = frozenset(
    onnx.TensorProto.DataType.Value(name)
    for name in "FLOAT DOUBLE FLOAT16 BFLOAT16 BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64".split()
)

# Slots of the schema's tables, in the schema's order.
_CHECKPOINT_VERSION, _CHECKPOINT_MODULE, _CHECKPOINT_OPTIMIZERS, _CHECKPOINT_PROPERTIES = range(4)
_MODULE_TRAINED, _MODULE_FROZEN, _MODULE_NOMINAL, _MODULE_EXTERNAL = range(4)
_GROUP_NAME, _GROUP_STEP, _GROUP_LEARNING_RATE, _GROUP_STATES = range(4)
_STATE_PARAMETER, _STATE_MOMENTS = range(2)
_TENSOR_NAME, _, _TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_DATA, _, _TENSOR_OFFSET = range(7)
_PROPERTIES_INTS, _PROPERTIES_FLOATS, _PROPERTIES_STRINGS = range(3)
_PROPERTY_NAME, _PROPERTY_VALUE = range(2)


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint of onnxruntime-training at `path`.

    The optimizer's state has the names that our optimizer models give it: `<parameter>_first_moment`,
    `<parameter>_second_moment` and `step`. The learning rate is the one that the format holds, which is the
    optimizer's initial one.

    Raises:
        FileNotFoundError: there is no file, or none with the tensors' bytes beside it.
        ValueError: the file is no such checkpoint, is damaged, or is of a version that is not known.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at '{path}'.")
    try:
        return _Reader(path).checkpoint()
    except _DamagedError as error:
        raise ValueError(f"'{path}' is not a whole checkpoint of onnxruntime-training: {error}.") from None


class _DamagedError(Exception):
    """What is wrong with the file."""


class _Buffer:
    """Bytes of a file, read with checks."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def number(self, form: str, position: int) -> int | float:
        """The number at `position`; `form` is that of the struct module."""
        size = struct.calcsize(form)
        if not 0 <= position <= len(self.data) - size:
            raise _DamagedError(f"it ends before byte {position + size}, at {len(self.data)}")
        return struct.unpack_from(form, self.data, position)[0]

    def integer(self, form: str, position: int) -> int:
        return int(self.number(form, position))

    def follow(self, position: int) -> int:
        """Where the offset at `position` leads to; offsets count from where they stand."""
        return position + self.integer("<I", position)

    def vector(self, position: int, size: int) -> tuple[int, int]:
        """Where the elements of the vector at `position` begin, and how many there are, of `size` bytes
        each."""
        count = self.integer("<I", position)
        first = position + 4
        if first + count * size > len(self.data):
            raise _DamagedError(
                f"a list of {count} elements at byte {position} reaches beyond its end at {len(self.data)}"
            )
        return first, count


class _Table:
    """A table of the buffer: fields that are found through a list of offsets, and may be absent."""

    def __init__(self, buffer: _Buffer, position: int) -> None:
        self.buffer = buffer
        self.position = position
        self._offsets = position - buffer.integer("<i", position)
        self._size = buffer.integer("<H", self._offsets)

    def _field(self, slot: int) -> int | None:
        """Where the field is, None if it is absent."""
        place = 4 + 2 * slot
        if place + 2 > self._size:
            return None
        offset = self.buffer.integer("<H", self._offsets + place)
        return self.position + offset if offset else None

    def integer(self, slot: int, form: str, default: int = 0) -> int:
        field = self._field(slot)
        return default if field is None else self.buffer.integer(form, field)

    def real(self, slot: int) -> float:
        field = self._field(slot)
        return 0.0 if field is None else float(self.buffer.number("<f", field))

    def table(self, slot: int) -> _Table | None:
        field = self._field(slot)
        return None if field is None else _Table(self.buffer, self.buffer.follow(field))

    def vector(self, slot: int, size: int) -> tuple[int, int]:
        field = self._field(slot)
        return (0, 0) if field is None else self.buffer.vector(self.buffer.follow(field), size)

    def tables(self, slot: int) -> Iterator[_Table]:
        first, count = self.vector(slot, 4)
        for index in range(count):
            yield _Table(self.buffer, self.buffer.follow(first + 4 * index))

    def text(self, slot: int) -> str:
        first, count = self.vector(slot, 1)
        try:
            return self.buffer.data[first : first + count].decode()
        except UnicodeDecodeError:
            raise _DamagedError(f"the text at byte {first} is not UTF-8") from None

    def integers(self, slot: int) -> list[int]:
        first, count = self.vector(slot, 8)
        return [self.buffer.integer("<q", first + 8 * index) for index in range(count)]


class _Reader:
    """Reads one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = _Buffer(path.read_bytes())
        self.external: np.ndarray | None = None

    def checkpoint(self) -> Checkpoint:
        if self.buffer.data[4:8] != IDENTIFIER:
            raise _DamagedError(f"bytes 4 to 7 must be {IDENTIFIER!r}, and are {self.buffer.data[4:8]!r}")
        root = _Table(self.buffer, self.buffer.follow(0))
        version = root.integer(_CHECKPOINT_VERSION, "<i")
        if version not in VERSIONS:
            raise _DamagedError(f"its format version must be one of {VERSIONS}, and is {version}")
        module = root.table(_CHECKPOINT_MODULE)
        if module is None:
            raise _DamagedError("it holds no parameters")
        nominal = bool(module.integer(_MODULE_NOMINAL, "<B"))
        if module.integer(_MODULE_EXTERNAL, "<B"):
            self.external = self._external_data()
        trained = dict(self._tensors(module, _MODULE_TRAINED, nominal))
        frozen = dict(self._tensors(module, _MODULE_FROZEN, nominal))
        both = sorted(set(trained) & set(frozen))
        if both:
            raise _DamagedError(f"{', '.join(map(repr, both))} cannot be both trained and frozen")
        state, learning_rate = self._optimizer(root, trained)
        return Checkpoint(
            parameters={**trained, **frozen},
            optimizer_state=state,
            learning_rate=learning_rate,
            frozen=frozenset(frozen),
            properties=self._properties(root.table(_CHECKPOINT_PROPERTIES)),
            nominal=nominal,
        )

    def _external_data(self) -> np.ndarray:
        path = self.path.with_name(self.path.name + EXTERNAL_DATA_SUFFIX)
        if not path.is_file():
            raise FileNotFoundError(
                f"the tensors of the checkpoint '{self.path}' are in '{path}', which is not there; put it "
                "beside the checkpoint."
            )
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)

    def _tensors(self, table: _Table, slot: int, nominal: bool = False) -> Iterator[tuple[str, np.ndarray]]:
        for tensor in table.tables(slot):
            yield tensor.text(_TENSOR_NAME), self._tensor(tensor, nominal)

    def _tensor(self, tensor: _Table, nominal: bool) -> np.ndarray:
        name = tensor.text(_TENSOR_NAME)
        dtype = self._dtype(tensor.integer(_TENSOR_TYPE, "<i"), name)
        shape = tensor.integers(_TENSOR_DIMS)
        try:
            zeros = np.broadcast_to(np.zeros((), dtype), shape)
        except ValueError:
            raise _DamagedError(f"the tensor {name!r} cannot have the shape {shape}") from None
        if nominal:
            return zeros
        size = math.prod(shape) * dtype.itemsize
        offset = tensor.integer(_TENSOR_OFFSET, "<q", default=-1)
        if self.external is not None and offset >= 0:
            data = self.external[offset : offset + size]
        else:
            first, count = tensor.vector(_TENSOR_DATA, 1)
            data = np.frombuffer(self.buffer.data, np.uint8, count, first)
        if len(data) != size:
            raise _DamagedError(
                f"the tensor {name!r} of shape {shape} must have {size} bytes, and has {len(data)}"
            )
        return np.array(data).view(dtype).reshape(shape)

    def _dtype(self, number: int, name: str) -> np.dtype:
        if number not in _TYPES:
            raise _DamagedError(f"the tensor {name!r} has type {number}, which no parameter has")
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number))

    def _optimizer(
        self, root: _Table, trained: dict[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], float | None]:
        """State by the names of our optimizer models, and the learning rate; of all groups."""
        state: dict[str, np.ndarray] = {}
        steps, rates = set(), set()
        for group in root.tables(_CHECKPOINT_OPTIMIZERS):
            steps.add(group.integer(_GROUP_STEP, "<q"))
            rates.add(group.real(_GROUP_LEARNING_RATE))
            for entry in group.tables(_GROUP_STATES):
                state |= self._state_of(entry, trained)
        if not steps:
            return {}, None
        if len(steps) > 1 or len(rates) > 1:
            raise _DamagedError(
                "its groups of parameters have different steps or learning rates, which onnxruntime-training "
                "cannot use either"
            )
        state[STEP] = np.array(steps.pop(), np.int64)
        return state, rates.pop()

    def _state_of(self, entry: _Table, trained: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        parameter = entry.text(_STATE_PARAMETER)
        if parameter not in trained:
            raise _DamagedError(f"the optimizer has state of {parameter!r}, which is not trained")
        state = {}
        for name, moment in self._tensors(entry, _STATE_MOMENTS):
            if name not in _MOMENT_SUFFIXES or moment.shape != trained[parameter].shape:
                raise _DamagedError(
                    f"the optimizer's {name!r} of {parameter!r} is not known, or of another shape"
                )
            state[parameter + _MOMENT_SUFFIXES[name]] = moment
        return state

    def _properties(self, bag: _Table | None) -> dict[str, int | float | str]:
        if bag is None:
            return {}
        properties: dict[str, int | float | str] = {}
        for entry in bag.tables(_PROPERTIES_INTS):
            properties[entry.text(_PROPERTY_NAME)] = entry.integer(_PROPERTY_VALUE, "<q")
        for entry in bag.tables(_PROPERTIES_FLOATS):
            properties[entry.text(_PROPERTY_NAME)] = entry.real(_PROPERTY_VALUE)
        for entry in bag.tables(_PROPERTIES_STRINGS):
            properties[entry.text(_PROPERTY_NAME)] = entry.text(_PROPERTY_VALUE)
        return properties
