"""One candidate of `ort-ops bench step` in a process of its own, which takes steps when it is told to.

Run as a file, `python bench_worker.py CANDIDATE CASE FOLDER THREADS`: the environment of another runtime has
no ort_ops. It reads one number per line from its standard input and answers each with one line of JSON: the
losses and seconds of that many steps, and the most memory that the process has held so far.

Every candidate starts from the parameters in FOLDER, which the candidate `export` puts there together with
ort_ops' artifacts, and makes the same steps: forward, backward, AdamW.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
EPSILON = 1e-8

PARAMETERS = "parameters.npz"
BATCH = "batch.npz"
ARTIFACTS = "artifacts"
LABELS = "labels"

Step = Callable[[], float]
"""Trains on the batch once and returns the loss before that."""


def main() -> None:
    """Prepare the candidate that the command line names, then take steps until the input ends."""
    candidate, case, folder, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not come among the answers
    step = CANDIDATES[candidate](case, Path(folder), int(threads))
    for line in sys.stdin:
        losses, seconds = [], []
        for _ in range(int(line)):
            start = time.perf_counter()
            losses.append(float(step()))
            seconds.append(time.perf_counter() - start)
        answers.write(json.dumps({"losses": losses, "seconds": seconds, "peak_bytes": peak_bytes()}) + "\n")


def peak_bytes() -> int:
    """The most memory that this process has held at once."""
    # Not getrusage: its figure also counts the process that started this one.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


# -- PyTorch -------------------------------------------------------------------------------------------------


def export(case_name: str, folder: Path, threads: int) -> Step:
    """Write the first parameters, the batch, and ort_ops' artifacts of the exported module."""
    import torch

    from ort_ops.training import artifacts
    from ort_ops.training.optimizer import AdamW

    case, module = _case(case_name), _module(case_name, threads)
    np.savez(folder / PARAMETERS, **{name: value.numpy() for name, value in module.state_dict().items()})
    np.savez(folder / BATCH, **case.inputs, **{LABELS: case.labels})
    program = torch.onnx.export(
        module,
        tuple(torch.from_numpy(value) for value in case.inputs.values()),
        input_names=list(case.inputs),
        output_names=["logits"],
        dynamo=True,
        optimize=False,  # it would give the weights other names and layouts
        verbose=False,
    )
    assert program is not None
    artifacts.generate_artifacts(
        program.model_proto,
        requires_grad=trained_names(folder),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=AdamW(weight_decay=WEIGHT_DECAY, epsilon=EPSILON),
        artifact_directory=folder / ARTIFACTS,
    )

    def step() -> float:
        return 0.0

    return step


def eager(case: str, folder: Path, threads: int) -> Step:
    """PyTorch as it is."""
    return _torch_step(case, folder, threads, compiled=False)


def compiled(case: str, folder: Path, threads: int) -> Step:
    """PyTorch with the module compiled."""
    return _torch_step(case, folder, threads, compiled=True)


def _case(name: str):
    sys.path.insert(0, str(Path(__file__).parent))
    from bench_models import find_case

    return find_case(name)


def _module(case: str, threads: int):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return _case(case).make()


def _loaded_module(case: str, folder: Path, threads: int):
    import torch

    module = _module(case, threads)
    with np.load(folder / PARAMETERS) as stored:
        module.load_state_dict({name: torch.from_numpy(stored[name]) for name in stored.files})
    return module


def _torch_step(case: str, folder: Path, threads: int, compiled: bool) -> Step:
    import torch
    import torch.nn.functional as F

    module = _loaded_module(case, folder, threads)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, eps=EPSILON
    )
    batch = {name: torch.from_numpy(value) for name, value in _batch(folder).items()}
    labels = batch.pop(LABELS)
    inputs = tuple(batch.values())

    def forward(*inputs):
        return F.cross_entropy(module(*inputs), labels)

    if compiled:
        forward = torch.compile(forward, dynamic=False)

    def step() -> float:
        loss = forward(*inputs)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _batch(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / BATCH) as stored:
        return {name: stored[name] for name in stored.files}


# -- ort_ops -------------------------------------------------------------------------------------------------


def ours(case: str, folder: Path, threads: int) -> Step:
    """The exported model, trained by ort_ops in the stock runtime."""
    import onnxruntime

    from ort_ops.training.api import CheckpointState, Module, Optimizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    path = folder / ARTIFACTS
    state = CheckpointState.load_checkpoint(path / "checkpoint")
    module = Module(path / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(path / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    batch = _batch(folder)

    def step() -> float:
        loss = float(module(batch))
        optimizer.step()
        module.lazy_reset_grad()
        return loss

    return step


def trained_names(folder: Path) -> list[str]:
    """The module's parameters, without BatchNorm's statistics."""
    with np.load(folder / PARAMETERS) as stored:
        return [name for name in stored.files if "running_" not in name and "num_batches" not in name]


# -- onnxruntime-training ------------------------------------------------------------------------------------


def peer(case_name: str, folder: Path, threads: int) -> Step:
    """The same module by way of onnxruntime-training's artifacts, from the exporter that it can read."""
    import onnx
    import onnxruntime
    import torch
    from onnxruntime.training import api, artifacts, onnxblock

    case, module = _case(case_name), _loaded_module(case_name, folder, threads)
    path = folder / "peer"
    path.mkdir()
    torch.onnx.export(
        module,
        tuple(torch.from_numpy(value) for value in case.inputs.values()),
        str(path / "forward.onnx"),
        input_names=list(case.inputs),
        output_names=["logits"],
        opset_version=14,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        dynamo=False,
    )
    forward = onnx.load(path / "forward.onnx")
    present = {tensor.name for tensor in forward.graph.initializer}
    names = [name for name in trained_names(folder) if name in present]

    artifacts.generate_artifacts(
        forward,
        requires_grad=names,
        frozen_params=[name for name in present if name not in names],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=onnxblock.optim.AdamW(eps=EPSILON, weight_decay=WEIGHT_DECAY),
        artifact_directory=str(path),
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    state = api.CheckpointState.load_checkpoint(str(path / "checkpoint"))
    trained = api.Module(str(path / "training_model.onnx"), state, session_options=options)
    optimizer = api.Optimizer(str(path / "optimizer_model.onnx"), trained)
    optimizer.set_learning_rate(LEARNING_RATE)
    batch = _batch(folder)
    arguments = [batch[name] for name in trained.input_names()]
    trained.train()

    def step() -> float:
        loss = trained(*arguments)
        optimizer.step()
        trained.lazy_reset_grad()
        return loss

    return step


CANDIDATES: dict[str, Callable[[str, Path, int], Step]] = {
    "export": export,
    "ours": ours,
    "eager": eager,
    "compile": compiled,
    "onnxruntime-training": peer,
}
"""By the name that the table gives them."""

if __name__ == "__main__":
    main()
