"""Models trained by onnxruntime-training: its artifacts, and what it makes of them in 25 steps.

Runs in an interpreter of its own, started by peer_artifacts.py; needs onnxruntime-training 1.19.2 and torch.
Per model there is a folder with the artifacts; where dropout does not make each run another one, also with

- data.npz: the inputs of each step, first axis the step;
- resumed_checkpoint: parameters and optimizer state after RESUMED steps;
- trained.npz: the loss of each step as `losses`, and the parameters after COMPARED steps and at the end as
  `compared/NAME` and `final/NAME`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnxruntime.training import artifacts, onnxblock
from onnxruntime.training.api import CheckpointState, Module, Optimizer
from torch import nn

STEPS, RESUMED, COMPARED = 25, 5, 20
LEARNING_RATE = 0.01
VOCABULARY, WIDTH, HEADS, BATCH, LENGTH = 13, 8, 2, 3, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.reshape(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=-1)
        )
        weights = torch.softmax(query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, dim=-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """`kind`: pre, post, parallel (one norm, as GPT-J), two_norms (parallel with a norm each) or shared."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.attention = kind, Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = self.norm1 if kind == "shared" else nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "post":
            x = self.norm1(x + self.drop(self.attention(x)))
            return self.norm2(x + self.drop(self.mlp(x)))
        if self.kind == "parallel":
            normed = self.norm1(x)
            return x + self.attention(normed) + self.mlp(normed)
        if self.kind == "two_norms":
            return x + self.attention(self.norm1(x)) + self.mlp(self.norm2(x))
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block(kind, dropout) for _ in range(2)))
        self.norm = nn.Identity() if kind == "post" else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.tokens(tokens) + self.positions)
        return self.head(self.norm(x)).reshape(-1, VOCABULARY)


class KeptAddends(nn.Module):
    """A norm of a sum whose addends the backward pass reads: relu's gradient reads its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.relu(self.first(x)) + torch.tanh(self.second(x))))


class Convolutions(nn.Module):
    """With batch norm, whose running statistics the forward pass updates."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.head = nn.Conv2d(4, 6, 3, stride=2), nn.Linear(6, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.conv1(x))), 2)
        x = torch.nn.functional.avg_pool2d(self.conv2(x), 2)
        return torch.nn.functional.log_softmax(self.head(x.flatten(1)), dim=-1)


def export(folder: Path, model: nn.Module, example: torch.Tensor, dynamic: bool) -> onnx.ModelProto:
    path = folder / "forward.onnx"
    torch.onnx.export(
        model.train(),
        (example,),
        str(path),
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        opset_version=14,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "rows"}} if dynamic else None,
    )
    return onnx.load(path)


def generate(
    folder: Path,
    model: nn.Module,
    inputs: np.ndarray,
    rows: int,
    optimizer: object,
    frozen: tuple[str, ...] = (),
    train: bool = True,
    dynamic: bool = True,
) -> None:
    """`inputs`: of all steps; `rows`: labels per step."""
    folder.mkdir()
    forward = export(folder, model, torch.from_numpy(inputs[0]), dynamic)
    trainable = {name for name, _ in model.named_parameters()} - set(frozen)
    weights = [tensor.name for tensor in forward.graph.initializer]
    artifacts.generate_artifacts(
        forward,
        requires_grad=[name for name in weights if name in trainable],
        frozen_params=[
            name for name in weights if name in dict(model.state_dict()) and name not in trainable
        ],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=optimizer,
        artifact_directory=str(folder),
    )
    if train:
        labels = np.random.default_rng(1).integers(0, VOCABULARY, (len(inputs), rows))
        np.savez(folder / "data.npz", x=inputs, labels=labels)
        run(folder, inputs, labels)


def run(folder: Path, inputs: np.ndarray, labels: np.ndarray) -> None:
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = Module(str(folder / "training_model.onnx"), state)
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(LEARNING_RATE)
    module.train()
    losses, results = [], {}
    for step in range(STEPS):
        if step == RESUMED:
            state.properties["epoch"], state.properties["note"] = 3, "resumed"
            state.properties["best"] = 0.5
            CheckpointState.save_checkpoint(state, str(folder / "resumed_checkpoint"), True)
        if step == COMPARED:
            results |= {f"compared/{name}": value.data.copy() for name, value in state.parameters}
        losses.append(module(inputs[step], labels[step]))
        optimizer.step()
        module.lazy_reset_grad()
    results |= {f"final/{name}": value.data for name, value in state.parameters}
    np.savez(folder / "trained.npz", losses=np.array(losses, np.float32), **results)


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCABULARY, (STEPS, BATCH, LENGTH))
    vectors = generator.standard_normal((STEPS, BATCH, WIDTH)).astype(np.float32)
    images = generator.standard_normal((STEPS, BATCH, 2, 12, 12)).astype(np.float32)
    adam, sgd = artifacts.OptimType.AdamW, artifacts.OptimType.SGD
    clipped = onnxblock.optim.AdamW(
        betas=(0.8, 0.99),
        eps=1e-5,
        weight_decay=0.1,
        clip_grad=onnxblock.optim.ClipGradNorm(0.5),
    )
    rows = BATCH * LENGTH
    frozen = ("tokens.weight", "blocks.0.norm1.weight", "blocks.1.norm2.bias")
    generate(folder / "pre_norm", Transformer("pre"), tokens, rows, adam)
    generate(folder / "post_norm", Transformer("post"), tokens, rows, clipped)
    generate(folder / "parallel", Transformer("parallel"), tokens, rows, adam)
    generate(folder / "two_norms", Transformer("two_norms"), tokens, rows, sgd)
    generate(folder / "shared_norm", Transformer("shared"), tokens, rows, adam)
    generate(folder / "frozen", Transformer("pre"), tokens, rows, adam, frozen)
    generate(folder / "kept_addends", KeptAddends(), vectors, BATCH, adam)
    generate(folder / "dropout_pre", Transformer("pre", 0.1), tokens, rows, adam, train=False)
    generate(folder / "dropout_post", Transformer("post", 0.1), tokens, rows, adam, train=False)
    generate(folder / "convolutions", Convolutions(), images, BATCH, adam, dynamic=False)


main(Path(sys.argv[1]))
