"""Gradients stop where PyTorch stops them, and losses are PyTorch's: against its own gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainings import gaussian, integers

from ort_ops.export import ExportError, forward_model_from_torch
from ort_ops.gradient import build_gradient_model

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Small(nn.Module):
    """An embedding with a padding row and two linear layers, and a loss made of them."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 5)
        with torch.no_grad():
            self.embedding.weight.copy_(gaussian(1, 7, 4))
        self._loss = loss

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._loss(self, tokens, labels)


def scores(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return module.second(torch.tanh(module.first(module.embedding(tokens))))


def padding(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores(module, tokens).mT, labels)


def detached(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = module.first(module.embedding(tokens))
    return (hidden * hidden.detach() + hidden.mean() * module.second.weight.detach().sum()).sum()


def without_gradient(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = module.first(module.embedding(tokens))
    with torch.no_grad():
        target = torch.softmax(3.0 * module.second(hidden), dim=-1)
        length = target.norm()
    return -(target * torch.log_softmax(module.second(hidden), dim=-1)).sum() * length


def straight_through(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    hidden = module.first(module.embedding(tokens))
    rounded = hidden + (torch.round(hidden) - hidden).detach()
    return module.second(rounded).pow(2).mean()


def smoothed(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores(module, tokens).mT, labels, label_smoothing=0.2)


def smoothed_and_weighted(module: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0])
    flat = scores(module, tokens).flatten(0, 1), labels.flatten()
    mean = F.cross_entropy(*flat, weight=weight, label_smoothing=0.3, ignore_index=3)
    total = F.cross_entropy(*flat, weight=weight, label_smoothing=0.1, ignore_index=1, reduction="sum")
    each = F.cross_entropy(*flat, label_smoothing=0.1, ignore_index=0, reduction="none")
    return mean + 0.1 * total + each.pow(2).mean()


@pytest.mark.parametrize(
    "loss", [padding, detached, without_gradient, straight_through, smoothed, smoothed_and_weighted]
)
def test_gradients_are_pytorchs(loss: Loss) -> None:
    torch.manual_seed(0)
    module = Small(loss)
    batch = {"tokens": integers(0, 7, 3, 6), "labels": integers(3, 5, 3, 6)}
    assert (batch["tokens"] == module.embedding.padding_idx).any()
    assert all((batch["labels"] == ignored).any() for ignored in (0, 1, 3))
    value = module(**batch)
    value.backward()
    expected = {name: tensor.grad for name, tensor in module.named_parameters() if tensor.grad is not None}
    forward = forward_model_from_torch(module, batch, training=True)
    model = build_gradient_model(forward, list(expected))
    onnx.checker.check_model(model, full_check=True)

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    read = {value.name for value in session.get_inputs()}
    tensors = {**batch, **{name: module.get_parameter(name).detach() for name in expected}}
    feeds = {name: tensor.numpy() for name, tensor in tensors.items() if name in read}
    result, *gradients = session.run(["loss", *(f"{name}_grad" for name in expected)], feeds)
    np.testing.assert_allclose(result, value.item(), rtol=1e-5)
    for (name, reference), gradient in zip(expected.items(), gradients, strict=True):
        # float32 sums of some hundred terms, of the size of the largest
        tolerance = 1e-5 * max(reference.abs().max().item(), 1e-3)
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=tolerance, err_msg=name)
        assert reference.abs().max() > 1e-3, name


class Reversed(torch.autograd.Function):
    """The identity, with a gradient that its forward does not show."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def test_a_backward_of_its_own_is_refused() -> None:
    module = Small(lambda module, tokens, labels: Reversed.apply(module.embedding(tokens)).sum())
    batch = {"tokens": integers(0, 7, 3, 6), "labels": integers(1, 5, 3, 6)}
    with pytest.raises(ExportError, match="Reversed is an autograd.Function, and its backward cannot be"):
        forward_model_from_torch(module, batch, training=True)
    forward_model_from_torch(module, batch)
    assert Reversed.apply(torch.ones(1)).item() == 1
