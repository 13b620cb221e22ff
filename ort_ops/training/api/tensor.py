"""Tensors that stay on the device from step to step; the element types of ONNX Runtime and NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort

from ort_ops.training.api.device import Device

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_DTYPES = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bfloat16)": BFLOAT16,
    **{f"tensor({n})": np.dtype(n) for n in ("int8", "int16", "int32", "int64", "bool")},
    **{f"tensor({n})": np.dtype(n) for n in ("uint8", "uint16", "uint32", "uint64")},
    "tensor(string)": np.dtype(object),
}

# What the widest vector registers load at once, and the size of a cache line.
_ALIGNMENT = 64


class Tensor:
    """A tensor in memory of its own on `device`, zeros at first. `value` is the OrtValue to bind.

    On the CPU `array` is the same memory as a NumPy array; on other devices it is None.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype, device: Device) -> None:
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.array: np.ndarray | None = None
        if device.kind == "cpu":
            self.array = _aligned_zeros(self.shape, self.dtype)
            self.value = ort_value(self.array)
        else:
            element_type = onnx.helper.np_dtype_to_tensor_dtype(self.dtype)
            self.value = ort.OrtValue.ortvalue_from_shape_and_type(
                self.shape, element_type, device.kind, device.index
            )
            self.write(np.zeros(self.shape, self.dtype))

    @classmethod
    def of(cls, array: np.ndarray, device: Device) -> Tensor:
        """A tensor with the values of `array`, which is copied."""
        tensor = cls(array.shape, array.dtype, device)
        tensor.write(array)
        return tensor

    def read(self) -> np.ndarray:
        """A copy of the values."""
        return self.array.copy() if self.array is not None else to_numpy(self.value)

    def on_host(self) -> np.ndarray:
        """The values, on the CPU without copying them."""
        return self.array if self.array is not None else to_numpy(self.value)

    def write(self, values: np.ndarray | ort.OrtValue) -> None:
        """Copy `values`, of this shape and type, into the tensor's memory."""
        if isinstance(values, ort.OrtValue):
            values = to_numpy(values)
        if self.array is not None:
            np.copyto(self.array, values)
        else:
            self.value.update_inplace(_as_runtime_type(values))


def dtype_of(runtime_type: str) -> np.dtype:
    """The NumPy type of what ONNX Runtime calls `tensor(float)` and so on; KeyError for other kinds."""
    return _DTYPES[runtime_type]


def ort_value(array: np.ndarray) -> ort.OrtValue:
    """An OrtValue on the CPU over the memory of `array`, which must be contiguous and outlive it."""
    if array.dtype == BFLOAT16:
        if not hasattr(ort.OrtValue, "ortvalue_from_numpy_with_onnx_type"):
            raise RuntimeError(
                f"ONNX Runtime {ort.__version__} takes no bfloat16 tensors from Python. Install a newer "
                "one, or use float32 parameters with compute_type='bfloat16'."
            )
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16), onnx.TensorProto.BFLOAT16
        )
    return ort.OrtValue.ortvalue_from_numpy(array)


def to_numpy(value: ort.OrtValue) -> np.ndarray:
    """The values of an OrtValue on any device; a view of its memory where the runtime gives one."""
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    if value.device_name() != "cpu":
        host = np.empty(value.shape(), BFLOAT16)
        ort_value(host).update_inplace(value)
        return host
    # The runtime has no NumPy type for it and refuses to convert.
    size = 2 * int(np.prod(value.shape()))
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), BFLOAT16).reshape(value.shape())


def check_tensor(name: str, wanted: ort.NodeArg, tensor: Tensor, model: str) -> None:
    """Raise ValueError unless `tensor` is what the input `wanted` of the `model` (e.g. "training model")
    takes.
    """
    if wanted.shape != list(tensor.shape) or dtype_of(wanted.type) != tensor.dtype:
        raise ValueError(
            f"'{name}' is {dtype_of(wanted.type)} {wanted.shape} in the {model} and {tensor.dtype} "
            f"{list(tensor.shape)} in the state. Take models and checkpoint from one call of "
            "generate_artifacts."
        )


def _as_runtime_type(array: np.ndarray) -> np.ndarray | ort.OrtValue:
    return ort_value(np.ascontiguousarray(array)) if array.dtype == BFLOAT16 else array


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)
