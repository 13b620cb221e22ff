"""Models of the `transformers` library learn in the runtime what they learn in PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from trainings import TorchTraining, export

from ort_ops.export import load_into_torch

STEPS = 20

LOSS_TOLERANCE = 1e-5
"""Relative. A float32 forward pass of these depths is within some 10 roundings (6e-8 each) of the exact one.
A gradient within 1e-5 of its tensor's largest moves an AdamW step of 1e-3 by less than 1e-8 on average, so 20
steps add less than the forward pass does."""

PARAMETER_TOLERANCE = STEPS * 1e-3 * 0.05
"""AdamW divides by the gradient's own size: where that is mere rounding, the two steps differ by as much as
the learning rate. This bounds the mean over a tensor, of which such elements are few."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_twenty_steps_agree_with_pytorch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]()
    module = architecture.module
    training = export(module, architecture.batch(0), tmp_path, dynamic_shapes=architecture.dynamic_shapes)
    assert set(training.module.gradients) == {
        name for name, tensor in module.named_parameters() if tensor.requires_grad
    }

    module.train()
    reference = TorchTraining(module, lambda called, batch: called(**batch)["loss"])
    losses = [
        (training.step(batch), reference.step(batch)) for batch in map(architecture.batch, range(STEPS))
    ]
    ours, theirs = np.array(losses).T
    np.testing.assert_allclose(ours, theirs, rtol=LOSS_TOLERANCE)
    assert len(np.unique(theirs)) == STEPS

    batch = architecture.batch(STEPS)
    after = training.evaluate(batch)
    np.testing.assert_allclose(after, reference.evaluate(batch), rtol=LOSS_TOLERANCE)

    received = copy.deepcopy(module)
    load_into_torch(received, training.save())
    np.testing.assert_allclose(
        TorchTraining(received, lambda m, b: m(**b)["loss"]).evaluate(batch), after, rtol=1e-6
    )
    for key, value in module.state_dict().items():
        difference = (received.state_dict()[key] - value).abs().float().mean()
        assert difference < PARAMETER_TOLERANCE, key
