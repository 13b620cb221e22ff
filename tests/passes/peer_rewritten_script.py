"""Trains rewritten training graphs in onnxruntime-training. Started by
test_use_add_layer_norm_grad_in_the_peer.py.

Each folder in the given one has training_model.onnx, optimizer_model.onnx, checkpoint and data.npz. The
results go to trained.npz: the loss of each step as `losses`, and the parameters by their names.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
from onnxruntime.training.api import CheckpointState, Module, Optimizer

import ort_ops

LEARNING_RATE = 0.01
STEPS = 20


def train(folder: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(ort_ops.library_path())
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = Module(str(folder / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(LEARNING_RATE)
    module.train()
    data, losses = np.load(folder / "data.npz"), []
    for step in range(STEPS):
        losses.append(module(data["x"][step], data["labels"][step]))
        optimizer.step()
        module.lazy_reset_grad()
    np.savez(folder / "trained.npz", losses=losses, **{name: value.data for name, value in state.parameters})


for path in Path(sys.argv[1]).glob("*/training_model.onnx"):
    train(path.parent)
