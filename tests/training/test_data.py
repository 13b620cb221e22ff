"""Samples from files, checked against a model's inputs, and the batches that they are put in."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy

from ort_ops.training.data import (
    fixed_batch_size,
    load_arrays,
    sample_count,
    select_inputs,
    split_off,
    take,
    training_batches,
    validation_batches,
)

ARRAYS = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "labels": np.array([2, 0, 1])}


def inputs(text: str) -> list[onnx.ValueInfoProto]:
    """The inputs written as in ONNX's text form."""
    graph = onnx.parser.parse_graph(f"g ({text}) => (float y) {{ y = Constant <value_float = 0.0> () }}")
    return list(graph.input)


INPUTS = inputs("float[N, 4] x, int64[N] labels")


def save(kind: str, folder: Path) -> Path:
    path = folder / f"data.{kind}"
    if kind == "npz":
        np.savez(path, **ARRAYS)
    elif kind == "safetensors":
        safetensors.numpy.save_file(ARRAYS, path)
    else:
        path.mkdir()
        for name, array in ARRAYS.items():
            np.save(path / f"{name}.npy", array)
    return path


@pytest.mark.parametrize("kind", ["npz", "safetensors", "folder"])
def test_reads_each_kind_of_file(kind: str, tmp_path: Path) -> None:
    arrays = load_arrays(save(kind, tmp_path))
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array, strict=True)


def test_a_folder_is_not_read_at_once(tmp_path: Path) -> None:
    arrays = select_inputs(load_arrays(save("folder", tmp_path)), INPUTS)
    assert all(isinstance(array, np.memmap) for array in arrays.values())


def test_refuses_files_that_are_not_data(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no data at '.*missing.npz'"):
        load_arrays(tmp_path / "missing.npz")
    (tmp_path / "table.csv").write_text("1,2")
    with pytest.raises(
        ValueError, match=r"an .npz or .safetensors file or a folder of .npy files; got .*savez"
    ):
        load_arrays(tmp_path / "table.csv")
    with pytest.raises(ValueError, match="must hold .npy files; there are none"):
        load_arrays(tmp_path)
    for kind in ("npz", "safetensors"):
        path = save(kind, tmp_path)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ValueError, match=f"'.*data.{kind}' is not a whole .{{0,1}}{kind} file"):
            load_arrays(path)
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="is not a whole .npz file of numbers"):
        load_arrays(tmp_path / "objects.npz")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "x.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="'.*x.npy' is not a whole .npy file of numbers"):
        load_arrays(tmp_path / "cut")


def test_selects_in_the_models_order_and_types() -> None:
    arrays = {
        "labels": ARRAYS["labels"].astype(np.int16),
        "unused": np.zeros(99),
        "x": ARRAYS["x"].astype(np.float64),
    }
    selected = select_inputs(arrays, INPUTS)
    assert list(selected) == ["x", "labels"]
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(selected[name], array, strict=True)


@pytest.mark.parametrize(
    ("got", "wanted", "fits"),
    [
        (np.float64, "float16", True),
        (ml_dtypes.bfloat16, "float", True),
        (np.float32, "bfloat16", True),
        (np.uint8, "float", True),
        (np.bool_, "float", True),
        (np.int64, "float", False),
        (np.int64, "int32", False),
        (np.float32, "int64", False),
        (np.float32, "bool", False),
    ],
)
def test_only_lossless_conversions_and_floats_to_floats(got: type, wanted: str, fits: bool) -> None:
    arrays, values = {"x": np.ones((2, 1), got)}, inputs(f"{wanted}[N, 1] x")
    if fits:
        assert select_inputs(arrays, values)["x"].astype(np.float64).tolist() == [[1], [1]]
    else:
        with pytest.raises(ValueError, match=rf"The array 'x' must be \w+ .* got {np.dtype(got)}.*x\.astype"):
            select_inputs(arrays, values)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("float[N] pixels", {"pixel": (2,)}, "it lacks 'pixels' (is 'pixel' meant?) and has pixel."),
        ("float[N] x, float[N] y", {"zeta": (2,)}, "it lacks 'x', 'y' and has zeta."),
        ("float[N, 4] x", {"x": (2, 3)}, "The array 'x' must be [samples, 4]; got [2, 3]."),
        ("float[N, 4] x", {"x": (2,)}, "The array 'x' must be [samples, 4]; got [2]."),
        ("float[N, T, 2] x", {"x": (2, 3, 4)}, "The array 'x' must be [samples, T, 2]; got [2, 3, 4]."),
        (
            "float[N, T] x, float[N, T] y",
            {"x": (2, 3), "y": (2, 4)},
            "The arrays 'x' and 'y' must agree in the model's dimension 'T'; got 3 and 4.",
        ),
        ("float[N] x, float[N] y", {"x": (2,), "y": (3,)}, "the same samples; got 2 in 'x', 3 in 'y'."),
        ("float[N] x", {"x": (0,)}, "There must be at least one sample; the arrays x are empty."),
        ("float x", {"x": ()}, "the model's input 'x' is a scalar."),
    ],
)
def test_refuses_what_does_not_fit(text: str, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError) as caught:
        select_inputs(arrays, inputs(text))
    assert message in str(caught.value)


def test_the_batch_size_of_a_model() -> None:
    assert fixed_batch_size(INPUTS) is None
    assert fixed_batch_size(inputs("float[8, 4] x, int64[8] labels")) == 8


def test_every_sample_is_in_one_batch_of_an_epoch() -> None:
    batches = training_batches(10, 4, seed=0, epoch=1, drop_rest=False)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(np.concatenate(batches)) == list(range(10))
    dropped = training_batches(10, 4, seed=0, epoch=1, drop_rest=True)
    np.testing.assert_array_equal(dropped, batches[:2])
    again = training_batches(10, 4, seed=0, epoch=1, drop_rest=False)
    np.testing.assert_array_equal(np.concatenate(again), np.concatenate(batches))
    for seed, epoch in ((0, 2), (1, 1)):
        other = training_batches(10, 4, seed=seed, epoch=epoch, drop_rest=False)
        assert list(np.concatenate(other)) != list(np.concatenate(batches))
    assert [batch.tolist() for batch in validation_batches(3, 2, drop_rest=False)] == [[0, 1], [2]]


def test_split_off_parts_the_samples() -> None:
    def split(count: int, fraction: float, seed: int) -> list[list[int]]:
        parts = split_off({"x": np.arange(count), "y": -np.arange(count)}, fraction, seed)
        taken = [take(part, np.arange(sample_count(part))) for part in parts]
        assert all((arrays["x"] == -arrays["y"]).all() for arrays in taken)
        return [arrays["x"].tolist() for arrays in taken]

    training, held_out = split(20, 0.15, seed=0)
    assert sorted([*training, *held_out]) == list(range(20))
    assert len(held_out) == 3
    assert split(20, 0.15, seed=1)[1] != held_out
    assert [len(part) for part in split(2, 0.99, seed=0)] == [1, 1]
    assert [len(part) for part in split(2, 0.01, seed=0)] == [1, 1]
    with pytest.raises(ValueError, match="between 0 and 1; got 1.5"):
        split(20, 1.5, seed=0)
    with pytest.raises(ValueError, match="takes at least two; there is 1"):
        split(1, 0.5, seed=0)


def test_rows_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(20.0))
    training, _ = split_off(load_arrays(tmp_path), 0.5, seed=0)
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="r+")[:] = -1
    assert take(training, np.array([0, 9]))["x"].max() < 0
