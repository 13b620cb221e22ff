"""Samples to train on: arrays read from a file, checked against a model's inputs, split and put in batches.

A data set is a mapping of names to arrays whose first axis counts the samples. The order of the batches
depends on seed and epoch alone, so that a resumed run reads on where it was.
"""

from __future__ import annotations

import difflib
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import safetensors
import safetensors.numpy


class Rows:
    """Rows of an array, in any order; read when they are asked for."""

    def __init__(self, array: np.ndarray, indices: np.ndarray) -> None:
        self._array = array
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return self._array[self._indices[indices]]


Arrays = Mapping[str, np.ndarray | Rows]


def load_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of an .npz or .safetensors file, or of a folder of .npy files (named as the files, not
    read at once).

    Raises FileNotFoundError when there is nothing at `path`, ValueError when it is none of these kinds.
    """
    path = Path(path)
    if path.is_dir():
        arrays = {file.stem: _load_npy(file) for file in sorted(path.glob("*.npy"))}
        if not arrays:
            raise ValueError(f"The folder of data '{path}' must hold .npy files; there are none.")
        return arrays
    if not path.is_file():
        raise FileNotFoundError(f"There is no data at '{path}'.")
    if path.suffix == ".npz":
        return _load_npz(path)
    if path.suffix == ".safetensors":
        try:
            return safetensors.numpy.load_file(path)
        except safetensors.SafetensorError as error:
            raise ValueError(f"'{path}' is not a whole safetensors file: {error}.") from error
    raise ValueError(
        f"Data must be an .npz or .safetensors file or a folder of .npy files; got '{path}'. "
        f"numpy.savez('{path.stem}.npz', name=array, ...) writes one."
    )


def _load_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"'{path}' is not a whole .npy file of numbers: {error}") from error


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"'{path}' is not a whole .npz file of numbers: {error}") from error


def select_inputs(
    arrays: Mapping[str, np.ndarray], inputs: Sequence[onnx.ValueInfoProto]
) -> dict[str, np.ndarray]:
    """Those of `arrays` that the model's `inputs` name, in their order and of their types.

    Every array must have the input's rank and its fixed dimensions after the first, dimensions of one
    symbolic name must agree, all must count the same number of samples, and the values must fit the input's
    type: any float array goes into any float input, integers into what holds all of them exactly. Raises
    ValueError that names the array and what is wrong with it.
    """
    missing = [value.name for value in inputs if value.name not in arrays]
    if missing:
        raise ValueError(_missing(missing, list(arrays)))
    selected = {value.name: arrays[value.name] for value in inputs}
    symbols: dict[str, tuple[str, int]] = {}
    for value in inputs:
        _check_type(value, selected[value.name])
        _check_shape(value, selected[value.name], symbols)
    counts = {name: len(array) for name, array in selected.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"The first axis of every array must count the same samples; got "
            f"{', '.join(f'{count} in {name!r}' for name, count in counts.items())}."
        )
    if 0 in counts.values():
        raise ValueError(f"There must be at least one sample; the arrays {', '.join(counts)} are empty.")
    return {value.name: np.asanyarray(selected[value.name], _dtype(value)) for value in inputs}


def fixed_batch_size(inputs: Sequence[onnx.ValueInfoProto]) -> int | None:
    """The number of samples that the model insists on, or None when it takes any."""
    sizes = {value.type.tensor_type.shape.dim[0].dim_value for value in inputs} - {0}
    return sizes.pop() if sizes else None


def sample_count(arrays: Arrays) -> int:
    return len(next(iter(arrays.values())))


def take(arrays: Arrays, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The samples `indices` of every array."""
    return {name: array[indices] for name, array in arrays.items()}


def split_off(
    arrays: Mapping[str, np.ndarray], fraction: float, seed: int
) -> tuple[dict[str, Rows], dict[str, Rows]]:
    """The samples to train on and a random `fraction`, at least one sample, to validate on.

    Both are in the arrays' order; the choice depends on the number of samples, `fraction` and `seed` alone.
    """
    count = sample_count(arrays)
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"The fraction to validate on must be between 0 and 1; got {fraction}.")
    if count < 2:
        raise ValueError(f"Splitting off samples to validate on takes at least two; there is {count}.")
    held_out = min(max(1, round(count * fraction)), count - 1)
    # A stream of its own, so that the split has nothing to do with the order of the batches.
    order = np.random.default_rng([seed, _SPLIT_STREAM]).permutation(count)
    parts = np.sort(order[held_out:]), np.sort(order[:held_out])
    training, validation = ({name: Rows(array, part) for name, array in arrays.items()} for part in parts)
    return training, validation


def training_batches(count: int, size: int, seed: int, epoch: int, drop_rest: bool) -> list[np.ndarray]:
    """Indices of the samples of every batch of an epoch: all of them once, in random order.

    The last batch holds the rest, which may be fewer than `size`; with `drop_rest` it is left out.
    """
    order = np.random.default_rng([seed, _ORDER_STREAM, epoch]).permutation(count)
    return _batches(order, size, drop_rest)


def validation_batches(count: int, size: int, drop_rest: bool) -> list[np.ndarray]:
    """Indices of the samples of every batch, in their own order."""
    return _batches(np.arange(count), size, drop_rest)


_SPLIT_STREAM, _ORDER_STREAM = 0, 1


def _batches(order: np.ndarray, size: int, drop_rest: bool) -> list[np.ndarray]:
    last = len(order) - len(order) % size if drop_rest else len(order)
    return [order[first : first + size] for first in range(0, last, size)]


def _missing(missing: Iterable[str], names: list[str]) -> str:
    parts = []
    for name in missing:
        near = difflib.get_close_matches(name, names, n=1)
        parts.append(f"'{name}'" + (f" (is '{near[0]}' meant?)" if near else ""))
    return (
        f"The data must have an array for every input of the training model; it lacks {', '.join(parts)} "
        f"and has {', '.join(names)}."
    )


def _dtype(value: onnx.ValueInfoProto) -> np.dtype:
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _check_type(value: onnx.ValueInfoProto, array: np.ndarray) -> None:
    wanted = _dtype(value)
    is_float = np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16
    wants_float = np.issubdtype(wanted, np.floating) or wanted == ml_dtypes.bfloat16
    if not (is_float and wants_float) and not np.can_cast(array.dtype, wanted, "safe"):
        raise ValueError(
            f"The array '{value.name}' must be {wanted} or what converts to it without loss; got "
            f"{array.dtype}. Write it with {value.name}.astype('{wanted}') if no value is lost."
        )


def _check_shape(value: onnx.ValueInfoProto, array: np.ndarray, symbols: dict[str, tuple[str, int]]) -> None:
    dims = value.type.tensor_type.shape.dim
    wanted = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims]
    if not dims:
        raise ValueError(
            f"Every input must have samples along its first axis; the model's input '{value.name}' is a "
            f"scalar. Make it an initializer of the forward model."
        )
    fits = array.ndim == len(dims) and all(
        not dim.HasField("dim_value") or dim.dim_value == size
        for dim, size in zip(dims[1:], array.shape[1:], strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, ["samples", *wanted[1:]]))
        raise ValueError(f"The array '{value.name}' must be [{expected}]; got {list(array.shape)}.")
    for dim, size in zip(dims[1:], array.shape[1:], strict=True):
        other, known = symbols.setdefault(dim.dim_param, (value.name, size)) if dim.dim_param else ("", size)
        if known != size:
            raise ValueError(
                f"The arrays '{other}' and '{value.name}' must agree in the model's dimension "
                f"'{dim.dim_param}'; got {known} and {size}."
            )
