"""Writes checkpoints in the format of onnxruntime-training with FlatBuffers' own library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import flatbuffers
import numpy as np
import onnx


class Writer:
    """Writes tables slot by slot, each as a function that puts one field, in the order of the schema."""

    def __init__(self) -> None:
        self.builder = flatbuffers.Builder(0)

    def table(self, *fields: Callable[[int], None] | None) -> int:
        self.builder.StartObject(len(fields))
        for slot, put in enumerate(fields):
            if put is not None:
                put(slot)
        return self.builder.EndObject()

    def offset(self, target: int) -> Callable[[int], None]:
        return lambda slot: self.builder.PrependUOffsetTRelativeSlot(slot, target, 0)

    def text(self, value: str) -> Callable[[int], None]:
        return self.offset(self.builder.CreateString(value))

    def tables(self, targets: Sequence[int]) -> Callable[[int], None]:
        self.builder.StartVector(4, len(targets), 4)
        for target in reversed(targets):
            self.builder.PrependUOffsetTRelative(target)
        return self.offset(self.builder.EndVector())

    def int64(self, value: int, default: int = 0) -> Callable[[int], None]:
        return lambda slot: self.builder.PrependInt64Slot(slot, value, default)

    def int32(self, value: int) -> Callable[[int], None]:
        return lambda slot: self.builder.PrependInt32Slot(slot, value, 0)

    def real(self, value: float) -> Callable[[int], None]:
        return lambda slot: self.builder.PrependFloat32Slot(slot, value, 0.0)

    def boolean(self, value: bool) -> Callable[[int], None]:
        return lambda slot: self.builder.PrependBoolSlot(slot, value, False)

    def tensor(self, name: str, array: np.ndarray, offset: int = -1, empty: bool = False) -> int:
        dims = self.offset(self.builder.CreateNumpyVector(np.array(array.shape, np.int64)))
        data = None
        if offset < 0 and not empty:
            data = self.offset(self.builder.CreateByteVector(array.tobytes()))
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return self.table(
            self.text(name), None, dims, self.int32(kind), data, None, self.int64(offset, default=-1)
        )

    def tensors(self, arrays: Mapping[str, np.ndarray], **options: bool) -> Callable[[int], None]:
        return self.tables([self.tensor(name, array, **options) for name, array in arrays.items()])

    def finish(self, version: int, module: int | None, groups: Sequence[int] = (), bag: int = 0) -> bytes:
        root = self.table(
            self.int32(version),
            self.offset(module) if module is not None else None,
            self.tables(groups),
            self.offset(bag) if bag else None,
        )
        self.builder.Finish(root, file_identifier=b"ODTC")
        return bytes(self.builder.Output())
