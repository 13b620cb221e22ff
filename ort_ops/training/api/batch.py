"""A batch as the caller has it, NumPy arrays, OrtValues or tensors of any framework that speaks DLPack, and
the results in the same kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from ort_ops.training.api.tensor import dtype_of, ort_value, to_numpy

_DLPACK_CPU = 1


def named_batch(inputs: Sequence[Any], named: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The batch by input name, from positional inputs in the order of `names`, one mapping, or keywords."""
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        positional = dict(inputs[0])
    elif len(inputs) > len(names):
        raise ValueError(f"The model has {len(names)} inputs ({', '.join(names)}); got {len(inputs)}.")
    else:
        positional = dict(zip(names, inputs, strict=False))
    twice = sorted(set(positional) & set(named))
    missing = [name for name in names if name not in positional and name not in named]
    unknown = sorted((set(positional) | set(named)) - set(names))
    if twice or missing or unknown:
        problems = {"missing": missing, "unknown": unknown, "given twice": twice}
        listed = "; ".join(f"{what}: {', '.join(found)}" for what, found in problems.items() if found)
        raise ValueError(f"The batch must have exactly the inputs {', '.join(names)}; {listed}.")
    batch = {**positional, **named}
    return {name: batch[name] for name in names}


def to_ort_values(batch: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, ort.OrtValue]:
    """The batch as OrtValues, checked against the session's `inputs`. Memory of NumPy and DLPack is borrowed:
    the batch must live as long as the OrtValues are used.
    """
    values = {name: _to_ort_value(name, tensor) for name, tensor in batch.items()}
    for name, value in values.items():
        _check(name, value, inputs[name])
    return values


def result_converter(batch: Mapping[str, Any]) -> Callable[[ort.OrtValue], Any]:
    """What turns results into the kind of the batch: NumPy if it has any NumPy array, else OrtValue if it has
    any, else the framework's tensor.
    """
    tensors = list(batch.values())
    if any(isinstance(tensor, (np.ndarray, np.generic)) for tensor in tensors) or not tensors:
        return to_numpy
    framework = sys.modules[type(tensors[0]).__module__.partition(".")[0]]
    if any(isinstance(tensor, ort.OrtValue) for tensor in tensors) or not hasattr(framework, "from_dlpack"):
        return lambda value: value  # an OrtValue can be given to any from_dlpack
    # Older runtimes have OrtValues that do not speak DLPack.
    return lambda value: framework.from_dlpack(value if hasattr(value, "__dlpack__") else to_numpy(value))


def _to_ort_value(name: str, tensor: Any) -> ort.OrtValue:
    if isinstance(tensor, ort.OrtValue):
        return tensor
    if isinstance(tensor, (np.ndarray, np.generic)):
        # The runtime reads the bytes of an array as they lie, those of the other byte order as well.
        return ort_value(np.asarray(tensor, tensor.dtype.newbyteorder("="), order="C"))
    if hasattr(tensor, "__dlpack__"):
        return _from_dlpack(tensor)
    raise TypeError(
        f"Input '{name}' must be a NumPy array, an OrtValue or a tensor with __dlpack__ (as of PyTorch); "
        f"got {type(tensor).__name__}. Use numpy.asarray(...) with the type that the model wants."
    )


def _from_dlpack(tensor: Any) -> ort.OrtValue:
    if tensor.__dlpack_device__()[0] == _DLPACK_CPU:
        try:
            # The runtime itself takes contiguous tensors only.
            return ort_value(np.asarray(np.from_dlpack(tensor), order="C"))
        except (BufferError, RuntimeError):  # a type that NumPy does not have, such as bfloat16
            pass
    return ort.OrtValue.from_dlpack(tensor)


def _check(name: str, value: ort.OrtValue, wanted: Any) -> None:
    shape = list(value.shape())
    fits = len(shape) == len(wanted.shape) and all(
        not isinstance(size, int) or size == got for size, got in zip(wanted.shape, shape, strict=True)
    )
    if fits and value.data_type() == wanted.type:
        return
    dims = ", ".join("any" if size is None else str(size) for size in wanted.shape)
    raise ValueError(
        f"Input '{name}' must be {dtype_of(wanted.type)} [{dims}]; got {dtype_of(value.data_type())} {shape}."
    )
