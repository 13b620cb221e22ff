"""Models whose tensors lie in other files: not read, not changed, and the references stay relative."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from ort_ops.gradient import GradientError, build_gradient_model

TEXT = """<ir_version: 8, opset_import: ["": 18]> g (float[2,{rows}] x) => (float loss) {{
    y = MatMul(x, w)  z = MatMul(y, frozen)  loss = ReduceSum<keepdims=0>(z) }}"""
W = np.random.default_rng(0).standard_normal((400, 6)).astype(np.float32)
FROZEN = np.random.default_rng(1).standard_normal((6, 300)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = onnx.parser.parse_model(TEXT.format(rows=400))
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in {"w": W, "frozen": FROZEN}.items()
    )
    path = tmp_path / "forward.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="forward.data", size_threshold=0)
    return path


def check(training: onnx.ModelProto, folder: Path) -> None:
    (frozen,) = [tensor for tensor in training.graph.initializer if tensor.name == "frozen"]
    assert {entry.key: entry.value for entry in frozen.external_data}["location"] == "forward.data"
    assert not frozen.raw_data
    onnx.save(training, folder / "training.onnx")
    session = onnxruntime.InferenceSession(str(folder / "training.onnx"), providers=["CPUExecutionProvider"])
    x = np.ones((2, 400), np.float32)
    (gradient,) = session.run(["w_grad"], {"x": x, "w": W})
    np.testing.assert_allclose(gradient, np.repeat(2 * FROZEN.sum(axis=1)[None], 400, axis=0), rtol=1e-4)


@pytest.mark.parametrize("as_path", [True, False])
def test_references_stay(path: Path, as_path: bool) -> None:
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    model = path if as_path else onnx.load(path, load_external_data=False)
    check(build_gradient_model(model, ["w"]), path.parent)
    assert all(file.read_bytes() == content for file, content in files.items())


def test_a_missing_file_is_named(path: Path) -> None:
    (path.parent / "forward.data").unlink()
    with pytest.raises(GradientError, match="'forward.data', which is not in its folder"):
        build_gradient_model(path, ["w"])


def test_more_than_two_gigabytes_are_never_read(tmp_path: Path) -> None:
    """The tensors are 3 GB of a sparse file; building takes a moment and a small message."""
    rows = 3 * 2**30 // 4 // 6
    model = onnx.parser.parse_model(TEXT.format(rows=rows))
    (tmp_path / "big.data").touch()
    with open(tmp_path / "big.data", "r+b") as file:
        file.truncate(rows * 6 * 4 + FROZEN.nbytes)
    offset = 0
    for name, shape in {"w": (rows, 6), "frozen": FROZEN.shape}.items():
        tensor = model.graph.initializer.add(name=name, data_type=onnx.TensorProto.FLOAT, dims=shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        length = 4 * shape[0] * shape[1]
        for key, value in {"location": "big.data", "offset": offset, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
        offset += length
    onnx.save(model, tmp_path / "big.onnx")
    training = build_gradient_model(tmp_path / "big.onnx", ["frozen"])
    assert len(training.SerializeToString()) < 10_000
    assert [value.name for value in training.graph.output] == ["loss", "frozen_grad"]
