"""A language model whose head is its embedding: one tensor in the files, trained and loaded back, with other
sizes of batch and sequence than it was exported with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainings import RuntimeTraining, TorchTraining, export, integers

from ort_ops.export import load_into_torch
from ort_ops.training.artifacts import LossType

STEPS = 20
VOCABULARY = 11


class LanguageModel(nn.Module):
    """With two norms that start equal, which must not become one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.mixing = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.embedding(tokens))
        x = self.norms[1](x + torch.cumsum(F.gelu(self.mixing(x)), dim=1))
        return self.head(x)


def batch(seed: int) -> dict[str, torch.Tensor]:
    shape = 1 + seed % 3, 2 + seed % 5
    return {"tokens": integers(seed, VOCABULARY, *shape), "labels": integers(-seed - 1, VOCABULARY, *shape)}


def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(module(batch["tokens"]).mT, batch["labels"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, RuntimeTraining]:
    torch.manual_seed(0)
    module = LanguageModel()
    training = export(
        module,
        integers(0, VOCABULARY, 3, 4),
        tmp_path_factory.mktemp("artifacts"),
        loss=LossType.CrossEntropyLoss,
        dynamic_shapes={"tokens": {0: "batch", 1: "sequence"}},
        additional_output_names=["output"],
    )
    reference = TorchTraining(module, loss)
    for step in range(STEPS):
        # float32: some hundred roundings in another order, of which few add up
        np.testing.assert_allclose(training.step(batch(step))[0], reference.step(batch(step)), rtol=1e-5)
    return module, training


def test_each_parameter_once_by_its_first_name(trained: tuple[nn.Module, RuntimeTraining]) -> None:
    module, training = trained
    names = set(training.module.gradients)
    assert names == {name for name, _ in module.named_parameters()}
    assert {"embedding.weight", "norms.0.weight", "norms.1.weight"} <= names


def test_loaded_back_it_gives_the_same_logits(trained: tuple[nn.Module, RuntimeTraining]) -> None:
    module, training = trained
    received = LanguageModel().eval()
    load_into_torch(received, training.save())
    assert received.head.weight is received.embedding.weight
    held_out = batch(99)
    logits = received(held_out["tokens"]).detach().numpy()
    # the same weights: roundings of one forward pass, of numbers of a few units
    np.testing.assert_allclose(logits, training.evaluate(held_out)[1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(logits, LanguageModel()(held_out["tokens"]).detach().numpy(), atol=1e-2)
