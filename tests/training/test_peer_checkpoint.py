"""Checkpoints of onnxruntime-training: files written by FlatBuffers' own library, files written by that
runtime, and damaged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from old_runtime import needs_old_runtime
from peer_artifacts import RESUMED, TRAINED, peer_artifacts
from peer_checkpoint_writer import Writer

from ort_ops.training import peer_checkpoint

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3) / 7
TRAINED_TENSORS = {
    "weight": WEIGHT,
    "scalar": np.array(2.5, np.float32),
    "é": np.array([1, -2, 0.5], np.float16),
    "wide": np.array([[1e-300]]),
    "brain": np.array([1.5, 3], ml_dtypes.bfloat16),
}
FROZEN_TENSORS = {"table": np.array([[1, 2], [3, 4]], np.int64), "nothing": np.zeros((0, 4), np.float32)}


def whole(steps: Sequence[int] = (7,), version: int = 2) -> bytes:
    writer = Writer()
    module = writer.table(writer.tensors(TRAINED_TENSORS), writer.tensors(FROZEN_TENSORS))
    groups = []
    for step in steps:
        moments = writer.tensors({"momentum0": WEIGHT + 1, "momentum1": WEIGHT + 2})
        state = writer.table(writer.text("weight"), moments)
        name = writer.text("group0")
        groups.append(writer.table(name, writer.int64(step), writer.real(0.125), writer.tables([state])))
    ints = writer.tables([writer.table(writer.text("epoch"), writer.int64(-(2**40)))])
    floats = writer.tables([writer.table(writer.text("best"), writer.real(0.75))])
    strings = writer.tables([writer.table(writer.text("note"), writer.text("fürs Protokoll"))])
    return writer.finish(version, module, groups, writer.table(ints, floats, strings))


def read(folder: Path, data: bytes) -> peer_checkpoint.Checkpoint:
    path = folder / "checkpoint"
    path.write_bytes(data)
    return peer_checkpoint.read(path)


@pytest.mark.parametrize("version", [1, 2])
def test_everything_is_read(tmp_path: Path, version: int) -> None:
    checkpoint = read(tmp_path, whole(version=version))
    expected = {**TRAINED_TENSORS, **FROZEN_TENSORS}
    assert list(checkpoint.parameters) == list(expected)
    for name, array in checkpoint.parameters.items():
        assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape)
        np.testing.assert_array_equal(array, expected[name])
        assert array.flags.writeable
    assert checkpoint.frozen == frozenset(FROZEN_TENSORS)
    assert sorted(checkpoint.optimizer_state) == ["step", "weight_first_moment", "weight_second_moment"]
    np.testing.assert_array_equal(checkpoint.optimizer_state["weight_first_moment"], WEIGHT + 1)
    np.testing.assert_array_equal(checkpoint.optimizer_state["weight_second_moment"], WEIGHT + 2)
    assert (checkpoint.step, checkpoint.learning_rate, checkpoint.nominal) == (7, 0.125, False)
    assert checkpoint.properties == {"epoch": -(2**40), "best": 0.75, "note": "fürs Protokoll"}


def test_a_checkpoint_without_optimizer_and_properties(tmp_path: Path) -> None:
    writer = Writer()
    checkpoint = read(tmp_path, writer.finish(2, writer.table(writer.tensors(TRAINED_TENSORS))))
    assert (checkpoint.optimizer_state, checkpoint.learning_rate, checkpoint.properties) == ({}, None, {})
    assert checkpoint.frozen == frozenset() and list(checkpoint.parameters) == list(TRAINED_TENSORS)


def test_a_nominal_checkpoint_has_shapes_alone(tmp_path: Path) -> None:
    writer = Writer()
    module = writer.table(writer.tensors({"weight": WEIGHT}, empty=True), None, writer.boolean(True))
    checkpoint = read(tmp_path, writer.finish(2, module))
    assert checkpoint.nominal
    assert checkpoint.parameters["weight"].shape == (2, 3)
    assert checkpoint.parameters["weight"].dtype == np.float32


def external(offset: int = 64) -> bytes:
    writer = Writer()
    tensors = writer.tables([writer.tensor("weight", WEIGHT, offset=offset)])
    return writer.finish(2, writer.table(tensors, None, None, writer.boolean(True)))


def test_tensors_in_a_second_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.data").write_bytes(bytes(64) + WEIGHT.tobytes())
    np.testing.assert_array_equal(read(tmp_path, external()).parameters["weight"], WEIGHT)


def test_a_second_file_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.data").write_bytes(bytes(64) + WEIGHT.tobytes()[:-1])
    with pytest.raises(ValueError, match=r"'weight' of shape \[2, 3\] must have 24 bytes, and has 23"):
        read(tmp_path, external())


def test_a_second_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"checkpoint\.data', which is not there"):
        read(tmp_path, external())


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        peer_checkpoint.read(tmp_path / "checkpoint")


def both_ways() -> bytes:
    writer = Writer()
    return writer.finish(
        2, writer.table(writer.tensors({"weight": WEIGHT}), writer.tensors({"weight": WEIGHT}))
    )


def unknown_state() -> bytes:
    writer = Writer()
    module = writer.table(writer.tensors({"weight": WEIGHT}))
    state = writer.table(writer.text("other"), writer.tensors({"momentum0": WEIGHT}))
    return writer.finish(2, module, [writer.table(None, None, None, writer.tables([state]))])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: b"", "bytes 4 to 7 must be b'ODTC', and are b''"),
        (lambda: whole().replace(b"ODTC", b"ORTM"), "and are b'ORTM'"),
        (lambda: whole(version=3), "its format version must be one of"),
        (lambda: Writer().finish(2, None), "it holds no parameters"),
        (lambda: whole(steps=(7, 8)), "different steps or learning rates"),
        (both_ways, "'weight' cannot be both trained and frozen"),
        (unknown_state, "the optimizer has state of 'other', which is not trained"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, data: Callable[[], bytes], message: str) -> None:
    with pytest.raises(ValueError, match="is not a whole checkpoint of onnxruntime-training") as error:
        read(tmp_path, data())
    assert message in str(error.value)


def is_read_or_refused(folder: Path, data: bytes) -> bool:
    """Whether it is refused; anything but a clear error fails the test."""
    try:
        read(folder, data)
    except (ValueError, FileNotFoundError) as error:
        assert "checkpoint" in str(error)
        return True
    return False


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    data = whole()
    refused = [is_read_or_refused(tmp_path, data[:size]) for size in range(len(data))]
    # FlatBuffers pads at the front, so the last bytes are those of the first tensor written
    assert all(refused)


def test_changed_bytes_never_break_the_reader(tmp_path: Path) -> None:
    data, generator, refused = whole(), np.random.default_rng(0), 0
    for place in range(len(data)):
        for byte in {0, 0xFF, data[place] ^ 1 << int(generator.integers(8))} - {data[place]}:
            refused += is_read_or_refused(tmp_path, data[:place] + bytes([byte]) + data[place + 1 :])
    assert refused > len(data) // 4


@needs_old_runtime
@pytest.mark.parametrize("name", TRAINED)
def test_what_the_peer_wrote(name: str) -> None:
    first = peer_checkpoint.read(peer_artifacts(name) / "checkpoint")
    resumed = peer_checkpoint.read(peer_artifacts(name) / "resumed_checkpoint")
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(peer_artifacts(name) / "forward.onnx").graph.initializer
    }
    assert first.step == 0 and first.optimizer_state == {} and first.properties == {}
    for parameter, array in first.parameters.items():
        np.testing.assert_array_equal(array, weights[parameter])
    assert resumed.step == RESUMED
    assert resumed.properties == {"epoch": 3, "note": "resumed", "best": 0.5}
    assert set(resumed.parameters) == set(first.parameters) and resumed.frozen == first.frozen
    for parameter in set(resumed.parameters) - resumed.frozen:
        moment = resumed.optimizer_state[f"{parameter}_first_moment"]
        assert moment.shape == resumed.parameters[parameter].shape
        assert not np.array_equal(resumed.parameters[parameter], first.parameters[parameter])
    for parameter in resumed.frozen:
        assert f"{parameter}_first_moment" not in resumed.optimizer_state
