"""What each rank runs in test_distributed.py: python distributed_script.py SCENARIO FOLDER, started by
mpirun."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import small_run

from ort_ops.training import distributed
from ort_ops.training.api.device import Device
from ort_ops.training.api.tensor import Tensor
from ort_ops.training.fit import fit
from ort_ops.training.metrics import StepMetrics

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

# 45 = 2 * 21 + 3: of the last batch one of four ranks has no sample.
SAMPLES = 45
VALIDATION_SAMPLES = 10
SETTINGS: dict[str, Any] = {"epochs": 4, "batch_size": 21, "learning_rate": lambda step: 0.02}
DEATH_STEP = 11  # in the last epoch, which has three steps


def train(
    folder: Path, communicator: Comm, checkpoint: Path | None = None, dies: bool = False
) -> dict[str, np.ndarray]:
    """A whole run, alike on all ranks. Returns losses and parameters, which rank 0 also leaves in a file."""
    module, optimizer = small_run.open_run(folder, checkpoint)
    if communicator.rank:  # undone by the broadcast
        module.state.parameters["hidden_bias"].data = np.ones(16, np.float32)
        optimizer.set_learning_rate(77.0)
    parallel = distributed.DataParallel(module, communicator)

    def on_step(metrics: StepMetrics) -> None:
        if dies and metrics.step == DEATH_STEP and communicator.rank == 1:
            if os.environ["DEATH"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("the data of rank 1 is gone")

    history = fit(
        module,
        optimizer,
        small_run.samples(SAMPLES),
        **SETTINGS,
        validation=small_run.samples(VALIDATION_SAMPLES, seed=2),
        checkpoint_path=folder / f"checkpoint_{communicator.size}",
        on_step=on_step,
        parallel=parallel,
    )
    losses = [[metrics.training_loss, metrics.validation_loss or 0.0] for metrics in history]
    result = {"losses": np.array(losses), **small_run.parameters(module)}
    assert_same_bits(communicator.allgather(result))
    if communicator.rank == 0:
        np.savez(folder / f"result_{communicator.size}", **result)
    return result


def assert_same_bits(results: list[dict[str, np.ndarray]]) -> None:
    for result in results[1:]:
        for name, value in results[0].items():
            np.testing.assert_array_equal(result[name], value, err_msg=name)


def train_batch_norm(folder: Path, communicator: Comm) -> None:
    """Each rank takes the statistics of its own samples; the running ones must be their average."""
    module, optimizer = small_run.open_run(folder)
    before = small_run.parameters(module)
    parallel = distributed.DataParallel(module, communicator)
    samples = small_run.samples(9)
    part = {name: parallel.share(array) for name, array in samples.items()}
    parallel.average_gradients(len(part["x"]), float(module(part)))
    after = small_run.parameters(module)
    hidden = samples["x"] @ before["hidden_weight"] + before["hidden_bias"]
    means = [rows.mean(axis=0) for rows in np.array_split(hidden, communicator.size)]
    sizes = [len(rows) for rows in np.array_split(hidden, communicator.size)]
    expected = 0.9 * before["mean"] + 0.1 * np.average(means, axis=0, weights=sizes)
    np.testing.assert_allclose(after["mean"], expected, rtol=1e-5, atol=1e-6)
    optimizer.step()
    parallel.check_equal()


def average_types(communicator: Comm) -> None:
    """Whatever type a gradient has, the average is that of the exact numbers, rounded once."""
    types = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]
    for used in (types[:3], types):
        values = [
            [(np.arange(1, 8) * (rank + 1) / 3).astype(dtype) for dtype in used]
            for rank in range(communicator.size)
        ]
        tensors = [Tensor.of(value, Device()) for value in values[communicator.rank]]
        buffer = distributed._FlatBuffer(tensors)
        loss = buffer.average(communicator.rank + 1, float(communicator.rank), communicator)
        weights = np.arange(1, communicator.size + 1)
        np.testing.assert_allclose(loss, np.average(range(communicator.size), weights=weights), rtol=1e-6)
        for index, tensor in enumerate(tensors):
            exact = np.average([v[index].astype(np.float64) for v in values], axis=0, weights=weights)
            # Computed in float32 or wider: products, sums and a quotient before the last rounding.
            computed = np.float64 if tensor.dtype == np.float64 else np.float32
            rounding = float(ml_dtypes.finfo(tensor.dtype).eps) + 4 * np.finfo(computed).eps
            np.testing.assert_allclose(tensor.read().astype(np.float64), exact, rtol=rounding)


def find_mistakes(folder: Path, communicator: Comm) -> None:
    """Rank 0 prints the errors that all ranks must get alike."""
    messages = []
    module, _ = small_run.open_run(folder)
    parallel = distributed.DataParallel(module, communicator)
    if communicator.rank == 1:
        module.state.parameters["output_bias"].data = np.ones(3, np.float32)
    for attempt in (parallel.check_equal, lambda: parallel.average_gradients(0, 1.0)):
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))

    module, optimizer = small_run.open_run(folder)
    parallel = distributed.DataParallel(module, communicator)
    samples = small_run.samples(SAMPLES + communicator.rank)
    try:
        fit(module, optimizer, samples, **SETTINGS, parallel=parallel)
    except ValueError as error:
        messages.append(str(error))

    module, _ = small_run.open_run(folder)
    if communicator.rank == 1:
        state = module.state.training_state
        state.parameters["output_bias"] = state.parameters["hidden_bias"]
    try:
        distributed.DataParallel(module, communicator)
    except ValueError as error:
        messages.append(str(error))
    assert communicator.allgather(messages) == [messages] * communicator.size
    if communicator.rank == 0:
        print("\n".join(messages))


def main(communicator: Comm) -> None:
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    if scenario == "train":
        results = [train(folder, communicator) for _ in range(2)]
        assert_same_bits(results)
    elif scenario == "die":
        train(folder, communicator, dies=True)
    elif scenario == "resume":
        train(folder, communicator, checkpoint=folder / f"checkpoint_{communicator.size}")
    else:
        find_mistakes(folder, communicator)
        train_batch_norm(folder / "batch_norm", communicator)
        average_types(communicator)
        raise ValueError("a mistake of all ranks")


if __name__ == "__main__":
    # onnxruntime-extensions imports them where they are installed, which takes longer than everything here.
    sys.modules |= dict.fromkeys(("torch", "transformers"))  # type: ignore[arg-type]
    distributed.run(main)
