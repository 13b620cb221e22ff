"""The models of `ort-ops bench step`, in PyTorch as its users write them.

Every model gives logits [examples, classes]; the loss is the mean cross entropy. This file imports PyTorch
and nothing of ort_ops: the environment of another runtime, which has no ort_ops, loads it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """One model with its batch.

    make: builds the module; its weights come from PyTorch's generator, which the caller seeds.
    inputs: the module's inputs by name, with values of the shape and type that it takes.
    labels: int64 [examples].
    """

    make: Callable[[], nn.Module]
    inputs: dict[str, np.ndarray]
    labels: np.ndarray


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(x).chunk(3, dim=-1)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.projection(attended.transpose(1, 2).reshape(batch, length, width))


class _GptBlock(nn.Module):
    """Pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, causal=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """Tokens [batch, length] to logits [batch * length, vocabulary]."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(_GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token_embedding(tokens) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class _BertBlock(nn.Module):
    """Post-norm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, causal=False)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.mlp_norm(x + self.mlp(x))


class Bert(nn.Module):
    """Tokens and token types [batch, length] to logits [batch, classes]."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.type_embedding = nn.Embedding(2, width)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(_BertBlock(width, heads, 1200) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        embedded = self.token_embedding(tokens) + self.type_embedding(types) + self.position_embedding
        x = self.norm(embedded)
        for block in self.blocks:
            x = block(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class Mlp(nn.Sequential):
    """Images [batch, 784] to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class Cnn(nn.Sequential):
    """Images [batch, 1, 28, 28] to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__(
            *self._stage(1, 16),
            *self._stage(16, 32),
            *self._stage(32, 32),
            nn.Flatten(),
            nn.Linear(32 * 3 * 3, 10),
        )

    @staticmethod
    def _stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


def gpt(
    width: int, batch: int = 8, length: int = 128, layers: int = 2, heads: int = 4, vocabulary: int = 512
) -> Case:
    """The pre-norm language model with a batch of random tokens."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, vocabulary, (batch, length))
    labels = random.integers(0, vocabulary, batch * length)
    return Case(lambda: Gpt(vocabulary, length, width, heads, layers), {"tokens": tokens}, labels)


def bert(width: int, batch: int, length: int, layers: int, heads: int, vocabulary: int) -> Case:
    """The post-norm encoder with a classifier and a batch of random tokens."""
    random = np.random.default_rng(0)
    inputs = {
        "tokens": random.integers(0, vocabulary, (batch, length)),
        "types": random.integers(0, 2, (batch, length)),
    }
    return Case(lambda: Bert(vocabulary, length, width, heads, layers), inputs, random.integers(0, 2, batch))


def images(make: Callable[[], nn.Module], batch: int, shape: tuple[int, ...]) -> Case:
    """A classifier of ten kinds of images with a batch of random ones."""
    random = np.random.default_rng(0)
    pictures = random.standard_normal((batch, *shape), dtype=np.float32)
    return Case(make, {"images": pictures}, random.integers(0, 10, batch))


CASES: dict[str, Callable[[], Case]] = {
    "GPT, 2 layers, d 256, 8 x 128": lambda: gpt(256),
    "GPT, 2 layers, d 64, 8 x 128": lambda: gpt(64),
    "BERT, 4 layers, d 312, 16 x 64": lambda: bert(312, 16, 64, 4, 12, 30522),
    "MLP, 784-512-512-10, batch 128": lambda: images(Mlp, 128, (784,)),
    "CNN with BatchNorm, batch 64": lambda: images(Cnn, 64, (1, 28, 28)),
}
"""The rows of the table of candidates."""

GROWTH_CASES: dict[str, Callable[[int], Case]] = {
    "layers": lambda times: gpt(64, layers=2 * times),
    "batch": lambda times: gpt(64, batch=8 * times),
    "tokens": lambda times: gpt(64, length=32 * times),
}
"""What grows in the table of growth, and the model in which it is `times` as large."""


def find_case(name: str) -> Case:
    """The case of a row's name: a key of CASES, or a key of GROWTH_CASES and a factor, as `layers 4`."""
    if name in CASES:
        return CASES[name]()
    grown, _, times = name.partition(" ")
    if grown not in GROWTH_CASES:
        raise ValueError(
            f"There is no such model as {name!r}; there are {', '.join([*CASES, *GROWTH_CASES])}."
        )
    return GROWTH_CASES[grown](int(times))
