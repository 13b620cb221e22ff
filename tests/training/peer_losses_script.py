"""Builds the losses of custom_losses.py with onnxruntime-training, trains one step and prints nothing: losses
and gradients go to peer_losses.npz in the folder that is given."""

from __future__ import annotations

import sys
from pathlib import Path

import custom_losses
import numpy as np
from onnxruntime.training import artifacts, onnxblock
from onnxruntime.training.api import CheckpointState, Module

folder = Path(sys.argv[1])
results: dict[str, np.ndarray] = {}
for name, (make, inputs, trained) in custom_losses.LOSSES.items():
    np.random.seed(0)
    artifacts.generate_artifacts(
        custom_losses.forward_model(),
        requires_grad=trained,
        loss=make(onnxblock),
        artifact_directory=folder,
        prefix=name,
    )
    state = CheckpointState.load_checkpoint(str(folder / f"{name}checkpoint"))
    module = Module(str(folder / f"{name}training_model.onnx"), state, str(folder / f"{name}eval_model.onnx"))
    assert module.input_names() == inputs, (name, module.input_names())
    returned = module(*(custom_losses.batch()[key] for key in inputs))
    for index, value in enumerate(returned if isinstance(returned, tuple) else [returned]):
        results[f"{name} result {index}"] = np.asarray(value)
    for parameter in trained:
        gradient = state.parameters[parameter].grad
        results[f"{name} {parameter}"] = gradient.reshape(custom_losses.SHAPES[parameter])
np.savez(folder / "peer_losses.npz", **results)
