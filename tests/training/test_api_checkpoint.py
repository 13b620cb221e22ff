"""CheckpointState: parameters and properties, saving and loading, nominal checkpoints."""

from __future__ import annotations

from pathlib import Path

import least_squares as ls
import ml_dtypes
import numpy as np
import pytest
from least_squares import assert_same_bits

from ort_ops.training.api import CheckpointState, Module, Parameter
from ort_ops.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint


def test_parameters_are_read_by_name_and_listed_in_alphabetical_order() -> None:
    state = ls.new_state()
    assert len(state.parameters) == 3
    assert "w" in state.parameters
    assert "v" not in state.parameters
    pairs = list(state.parameters)
    assert [name for name, _ in pairs] == ["a_offset", "b", "w"]
    assert [type(parameter) for _, parameter in pairs] == [Parameter] * 3
    assert [parameter.name for _, parameter in pairs] == ["a_offset", "b", "w"]
    assert [parameter.requires_grad for _, parameter in pairs] == [False, True, True]
    assert repr(state.parameters) == "Parameters(a_offset, b, w)"
    assert (
        repr(state.parameters["w"]) == "Parameter(name='w', dtype=float32, shape=(3, 2), requires_grad=True)"
    )
    with pytest.raises(KeyError, match="Parameter v not found"):
        state.parameters["v"]


def test_assigning_copies_into_what_the_module_uses() -> None:
    state = ls.new_state()
    module = ls.new_module(state)
    value = np.ones((3, 2), np.float32)
    state.parameters["w"] = value
    state.parameters["b"].data = np.zeros(2, np.float32)
    value[:] = 5
    read = state.parameters["w"].data
    np.testing.assert_array_equal(read, np.ones((3, 2), np.float32), strict=True)
    read[:] = 7
    data = ls.batch(0)
    expected = (np.square(data["x"].sum(axis=1, keepdims=True) + 0.5 - data["y"]).sum()) / 8
    assert module(data) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"'w' must be float32 \[3, 2\]; got float32 \[2, 3\]"):
        state.parameters["w"] = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"'w' must be float32 \[3, 2\]; got float64 \[3, 2\]"):
        state.parameters["w"].data = np.ones((3, 2))
    with pytest.raises(KeyError, match="Parameter v not found"):
        state.parameters["v"] = value


def test_properties_are_kept_with_their_types(tmp_path: Path) -> None:
    state = ls.new_state()
    state.properties["epoch"] = 3
    state.properties["loss"] = 0.1
    state.properties["note"] = "é"
    assert len(state.properties) == 3
    assert "loss" in state.properties
    assert repr(state.properties) == "Properties({'epoch': 3, 'loss': 0.1, 'note': 'é'})"
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    loaded = CheckpointState.load_checkpoint(str(tmp_path / "saved"))
    assert list(loaded.properties) == [("epoch", 3), ("loss", 0.1), ("note", "é")]
    assert [type(value) for _, value in loaded.properties] == [int, float, str]
    with pytest.raises(KeyError, match="Property other not found"):
        loaded.properties["other"]
    with pytest.raises(ValueError, match="must be an int, a float or a str; 'list' is a list"):
        loaded.properties["list"] = [1]  # type: ignore[assignment]


def test_a_nominal_checkpoint_refuses_to_run_until_it_is_filled(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "nominal", ls.first_checkpoint(nominal=True))
    state = CheckpointState.load_checkpoint(tmp_path / "nominal")
    module, optimizer = ls.new_training(state)
    for forbidden in (
        lambda: module(ls.batch(0)),
        optimizer.step,
        module.get_contiguous_parameters,
        lambda: module.export_model_for_inferencing(tmp_path / "never.onnx", ["prediction"]),
    ):
        with pytest.raises(RuntimeError, match="nominal checkpoint, and 3 of its parameters have no value"):
            forbidden()
    module.copy_buffer_to_parameters(ls.new_module().get_contiguous_parameters(trainable_only=True))
    with pytest.raises(RuntimeError, match=r"1 of its parameters have no value yet \(a_offset\)\."):
        module(ls.batch(0))
    with pytest.raises(RuntimeError, match=r"1 of its parameters have no value yet \(a_offset"):
        CheckpointState.save_checkpoint(state, tmp_path / "part")
    state.parameters["a_offset"] = ls.first_parameters()["a_offset"]
    assert module(ls.batch(0)) == ls.new_module()(ls.batch(0))
    CheckpointState.save_checkpoint(state, tmp_path / "filled")
    assert not load_checkpoint(tmp_path / "filled").nominal
    assert_same_bits(dict(load_checkpoint(tmp_path / "filled").parameters), ls.first_parameters())


def test_a_nominal_checkpoint_can_be_saved_again(tmp_path: Path) -> None:
    CheckpointState.save_checkpoint(CheckpointState(ls.first_checkpoint(nominal=True)), tmp_path / "again")
    assert load_checkpoint(tmp_path / "again").nominal


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int64])
def test_parameters_of_every_type_come_back(dtype: type, tmp_path: Path) -> None:
    values = {"p": np.arange(6).reshape(2, 3).astype(dtype), "empty": np.zeros((0, 2), dtype)}
    state = CheckpointState(Checkpoint(values))
    state.parameters["p"] = values["p"] + values["p"]
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    loaded = CheckpointState.load_checkpoint(tmp_path / "saved")
    np.testing.assert_array_equal(loaded.parameters["p"].data, values["p"] * 2)
    assert loaded.parameters["p"].data.dtype == dtype
    assert loaded.parameters["empty"].data.shape == (0, 2)


def test_one_state_is_shared_by_several_modules() -> None:
    state = ls.new_state()
    one, other = ls.new_module(state), ls.new_module(state)
    one(ls.batch(0))
    assert_same_bits({"w": other.gradients["w"].read()}, {"w": np.asarray(state.parameters["w"].grad)})
    state.parameters["b"] = np.array([3, 4], np.float32)
    assert one(ls.batch(0)) == other(ls.batch(0))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at '.*nowhere'"):
        CheckpointState.load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="'.*short' is not a whole safetensors file"):
        CheckpointState.load_checkpoint(tmp_path / "short")


def test_a_module_on_another_device_needs_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ls.new_state()
    ls.new_module(state)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    with pytest.raises(ValueError, match="on device 'cpu', where another Module uses it"):
        Module(ls.training_model(), state, device="cuda:1")
