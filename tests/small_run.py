"""A small classification problem, its artifacts, and one training run of it, alone or as one of several
ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from ort_ops.training import artifacts
from ort_ops.training.api import CheckpointState, Module, Optimizer

FORWARD_MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
classifier (float[N, 5] x) => (float[N, 3] logits)
{
    hidden = Gemm(x, hidden_weight, hidden_bias)
    active = Tanh(hidden)
    logits = Gemm(active, output_weight, output_bias)
}
"""

DROPOUT_MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
classifier (float[N, 5] x) => (float[N, 3] logits)
    <float ratio = {0.4}, bool train = {1}>
{
    hidden = Gemm(x, hidden_weight, hidden_bias)
    active = Tanh(hidden)
    kept = Dropout(active, ratio, train)
    logits = Gemm(kept, output_weight, output_bias)
}
"""

BATCH_NORM_MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
classifier (float[N, 5] x) => (float[N, 3] logits)
    <float[16] scale = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, float[16] mean = {0, 0, 0, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, float[16] variance = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}>
{
    hidden = Gemm(x, hidden_weight, hidden_bias)
    normal, mean_after, variance_after = BatchNormalization <training_mode = 1> (hidden, scale, hidden_bias,
    mean, variance) logits = Gemm(normal, output_weight, output_bias)
}
"""


def samples(count: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Points in three classes, by the sector that their first two coordinates lie in."""
    x = np.random.default_rng(seed).normal(size=(count, 5)).astype(np.float32)
    angle = np.arctan2(x[:, 1], x[:, 0]) + np.pi
    return {"x": x, "labels": np.minimum(angle * 3 / (2 * np.pi), 2).astype(np.int64)}


def forward_model(text: str = FORWARD_MODEL) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    shapes = {"hidden_weight": (5, 16), "hidden_bias": (16,), "output_weight": (16, 3), "output_bias": (3,)}
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(generator.normal(size=shape).astype(np.float32) / 2, name)
        for name, shape in shapes.items()
    )
    return model


def write_artifacts(folder: Path, text: str = FORWARD_MODEL) -> None:
    artifacts.generate_artifacts(
        forward_model(text),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )


def open_run(folder: Path, checkpoint: Path | None = None) -> tuple[Module, Optimizer]:
    """Module and optimizer on one thread, from the artifacts or from where `checkpoint` ended."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    state = CheckpointState.load_checkpoint(checkpoint or folder / "checkpoint")
    module = Module(
        folder / "training_model.onnx", state, folder / "eval_model.onnx", session_options=options
    )
    return module, Optimizer(folder / "optimizer_model.onnx", module)


def parameters(module: Module) -> dict[str, np.ndarray]:
    return {name: parameter.data for name, parameter in module.state.parameters}
