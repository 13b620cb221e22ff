"""Checkpoints: what goes in comes out, the same bytes each time, and a killed save leaves a whole file."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ort_ops.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint


def example(step: int = 7) -> Checkpoint:
    generator = np.random.default_rng(step)
    parameters = {
        "a.weight": generator.normal(size=(3, 4)).astype(np.float32),
        "transposed": generator.normal(size=(3, 4)).astype(np.float32).T,
        "optimizer/odd": np.array(np.nan, np.float32),
        "empty": np.zeros((0, 2), np.float32),
        "half": np.array([1.5, -2.0], np.float16),
        "brain": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    }
    state = {f"{name}_first_moment": np.ones_like(value) for name, value in parameters.items()}
    state["step"] = np.array(step, np.int64)
    return Checkpoint(
        parameters,
        state,
        learning_rate=0.1,
        frozen=frozenset({"transposed", "empty"}),
        properties={"loss": 0.1, "seed": 3, "text": "é"},
    )


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "checkpoint.safetensors"
    save_checkpoint(path, example())
    loaded = load_checkpoint(str(path))
    assert loaded.step == 7
    assert loaded.learning_rate == 0.1
    assert loaded.frozen == {"transposed", "empty"}
    assert loaded.properties == {"loss": 0.1, "seed": 3, "text": "é"}
    assert [type(loaded.properties[name]) for name in ("loss", "seed", "text")] == [float, int, str]
    assert not loaded.nominal
    for got, expected in (
        (loaded.parameters, example().parameters),
        (loaded.optimizer_state, example().optimizer_state),
    ):
        assert set(got) == set(expected)
        for name, value in expected.items():
            assert got[name].dtype == value.dtype
            np.testing.assert_array_equal(got[name], value, err_msg=name, strict=True)
    assert os.listdir(path.parent) == [path.name]


def test_same_state_gives_same_bytes_in_another_process(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "here", example())
    script = "import sys, test_checkpoint as t; t.save_checkpoint(sys.argv[1], t.example())"
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "there")],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()


def test_a_failed_save_keeps_the_old_file_and_leaves_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, example(1))

    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, example(2))
    assert load_checkpoint(path).step == 1
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_the_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint", example())
    (tmp_path / "other").touch()
    assert (tmp_path / "checkpoint").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_killed_save_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    """A process saves over and over and is killed at many different moments; every time the file is whole and
    all its tensors belong to one save."""
    script = textwrap.dedent("""
        import sys
        import numpy as np
        from ort_ops.training.checkpoint import Checkpoint, save_checkpoint
        step = 0
        while True:
            tensors = {f"w{i}": np.full((64, 1024), step, np.float32) for i in range(8)}
            state = {**tensors, "step": np.array(step)}
            save_checkpoint(sys.argv[1], Checkpoint(tensors, state))
            if step == 0:
                print("saved", flush=True)
            step += 1
    """)
    path = tmp_path / "checkpoint.safetensors"
    killed_while_writing, steps = 0, set()
    for trial in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"saved\n"
        time.sleep(0.003 * trial)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        killed_while_writing += path.with_name(path.name + ".tmp").exists()
        loaded = load_checkpoint(path)
        steps.add(loaded.step)
        assert len(loaded.parameters) == 8
        assert len(loaded.optimizer_state) == 9
        moments = [value for name, value in loaded.optimizer_state.items() if name != "step"]
        for tensor in (*loaded.parameters.values(), *moments):
            np.testing.assert_array_equal(tensor, np.full((64, 1024), loaded.step, np.float32))
    assert killed_while_writing > 0, "no kill fell into a write, so nothing was tested"
    assert len(steps) > 1
    save_checkpoint(path, example())
    assert os.listdir(tmp_path) == [path.name], "what the killed processes left is still there"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_nominal_checkpoint_has_shapes_and_no_values(tmp_path: Path, dtype: type) -> None:
    parameters = {"w": np.ones((1000, 1000), dtype), "b": np.ones((), dtype)}
    save_checkpoint(tmp_path / "nominal", Checkpoint(parameters, frozen=frozenset({"b"}), nominal=True))
    assert (tmp_path / "nominal").stat().st_size < 1000
    loaded = load_checkpoint(tmp_path / "nominal")
    assert loaded.nominal
    assert loaded.frozen == {"b"}
    shapes = {name: (value.dtype, value.shape) for name, value in loaded.parameters.items()}
    assert shapes == {"w": (np.dtype(dtype), (1000, 1000)), "b": (np.dtype(dtype), ())}
    assert loaded.parameters["w"].strides == (0, 0)


def test_refuses_what_it_could_not_give_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be an int, a float or a str; 'flags' is a list"):
        save_checkpoint(tmp_path / "no", Checkpoint({}, properties={"flags": [1]}))  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'done' is a bool"):
        save_checkpoint(tmp_path / "no", Checkpoint({}, properties={"done": True}))
    with pytest.raises(ValueError, match="it has no parameter b"):
        save_checkpoint(tmp_path / "no", Checkpoint({"a": np.zeros(1)}, frozen=frozenset("ab")))
    assert not (tmp_path / "no").exists()


def test_refuses_other_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at '.*nowhere'"):
        load_checkpoint(tmp_path / "nowhere")

    save_checkpoint(tmp_path / "whole", example())
    (tmp_path / "half").write_bytes((tmp_path / "whole").read_bytes()[:-5])
    with pytest.raises(ValueError, match="'.*half' is not a whole safetensors file"):
        load_checkpoint(tmp_path / "half")

    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, tmp_path / "weights", {"format": "np"})
    with pytest.raises(ValueError, match="must have the entry 'ort_ops.checkpoint'"):
        load_checkpoint(tmp_path / "weights")

    for state in ("no JSON", "[]", "{}", '{"learning_rate": 0.1, "frozen": null, "properties": {}}'):
        (tmp_path / "strange").write_bytes(safetensors.numpy.save({}, {"ort_ops.checkpoint": state}))
        with pytest.raises(ValueError, match="metadata of '.*strange' must be what save_checkpoint writes"):
            load_checkpoint(tmp_path / "strange")
