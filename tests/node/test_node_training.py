"""The files of a training run anywhere: onnxruntime-node, without the plugin, reaches the losses that Python
reaches with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import gpt
import numpy as np
import onnx
import safetensors.numpy

from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.artifacts import OptimType, generate_artifacts

CONFIG = gpt.GptConfig(vocabulary=23, context=12, width=24, heads=3, layers=2)
STEPS = 5
LEARNING_RATE = 1e-2
SCRIPT = Path(__file__).with_name("train.mjs")


def batch(seed: int) -> dict[str, np.ndarray]:
    text = np.random.default_rng(seed).integers(0, CONFIG.vocabulary, (4, CONFIG.context + 1))
    return {"tokens": text[:, :-1].copy(), "targets": text[:, 1:].copy()}


def losses_in_python(folder: Path) -> list[float]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        losses.append(float(module(batch(step))))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def test_the_small_gpt_trains_in_node(node_modules: Path, tmp_path: Path) -> None:
    parameters = gpt.initial_parameters(CONFIG, seed=0)
    generate_artifacts(
        gpt.build_loss_model(CONFIG, parameters),
        requires_grad=list(parameters),
        optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
    )
    nodes = [node.op_type for node in onnx.load(tmp_path / "training_model.onnx").graph.node]
    assert nodes.count("AddLayerNormGrad") == 2 * CONFIG.layers + 1
    batches = {f"{step}/{name}": array for step in range(STEPS) for name, array in batch(step).items()}
    safetensors.numpy.save_file(batches, tmp_path / "batches.safetensors")

    node = shutil.which("node")
    assert node is not None
    completed = subprocess.run(
        [node, SCRIPT, tmp_path, str(LEARNING_RATE)],
        text=True,
        capture_output=True,
        env={**os.environ, "NODE_PATH": str(node_modules)},
    )
    assert completed.returncode == 0, completed.stderr

    losses = json.loads(completed.stdout)
    assert losses[-1] != losses[0]
    # Another build of the runtime, and function bodies for kernels: float32 roundings, 2e-7 each, of a loss
    # of about 3 and of five updates.
    np.testing.assert_allclose(losses, losses_in_python(tmp_path), rtol=1e-5)
