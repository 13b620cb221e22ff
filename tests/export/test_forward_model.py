"""The forward model of a module: what is traced in which mode, and what inputs and outputs are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trainings import gaussian

from ort_ops.export import forward_model_from_torch, training_model_from_torch
from ort_ops.training.checkpoint import load_checkpoint


def outputs(model: onnx.ModelProto, **inputs: torch.Tensor) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    values = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(names, values, strict=True))


class StochasticDepth(nn.Module):
    """Drops whole rows in training: Python that asks for the mode, which a switch in the graph cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.linear(x)
        if self.training:
            branch = branch * (torch.rand(x.shape[0], 1) < 0.5)
        return x + branch


def test_each_mode_is_what_the_module_does_in_it() -> None:
    module, x = StochasticDepth(), gaussian(0, 400, 3)
    training = outputs(forward_model_from_torch(module, x, training=True), x=x)["output"]
    kept = np.any(training != x.numpy(), axis=1)
    assert abs(kept.mean() - 0.5) < 0.125  # five standard deviations of a share of 400 draws
    expected = module.eval()(x).detach().numpy()
    np.testing.assert_allclose(training[kept], expected[kept], rtol=1e-5, atol=1e-6)
    evaluation = outputs(forward_model_from_torch(module.train(), x), x=x)["output"]
    np.testing.assert_allclose(evaluation, expected, rtol=1e-5, atol=1e-6)
    assert module.training


class Structured(nn.Module):
    """Returns its input, a tensor twice, a loss, and something that is no tensor."""

    def forward(self, left: torch.Tensor, right: torch.Tensor | None = None, scale: float = 2.0) -> dict:
        product = left * scale
        result = {"left": left, "nested": [product, (product, None)], "cache": object()}
        return result if right is None else result | {"loss": (product - right).pow(2).mean()}


def test_names_of_inputs_and_outputs() -> None:
    model = forward_model_from_torch(
        Structured(),
        {"right": gaussian(0, 2, 3), "left": gaussian(1, 2, 3), "scale": 3.0},
        dynamic_shapes={"left": {0: "rows", 1: "columns"}, "right": {0: "rows", 1: "columns"}},
    )
    assert [value.name for value in model.graph.input] == ["right", "left"]
    dims = [dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
    assert dims == ["rows", "columns"] * 2
    left = gaussian(2, 4, 5)
    found = outputs(model, left=left, right=left * 3.0)
    assert list(found) == ["loss", "left_output", "nested_0", "nested_1_0"]
    assert found["loss"] == 0
    for name, factor in {"left_output": 1, "nested_0": 3, "nested_1_0": 3}.items():
        np.testing.assert_array_equal(found[name], left.numpy() * np.float32(factor))


def test_nothing_of_the_machine_is_in_the_file() -> None:
    model = forward_model_from_torch(StochasticDepth(), gaussian(0, 2, 3), training=True)
    assert Path(__file__).name.encode() not in model.SerializeToString()


class Spectral(nn.Module):
    """A weight divided by its largest singular value, which power iterations follow in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_every_buffer_that_changes_is_an_output() -> None:
    torch.manual_seed(0)
    module, x = Spectral(), gaussian(0, 2, 3)
    model = forward_model_from_torch(module, x, training=True)
    found = outputs(model, x=x)
    expected = module.train()(x)
    np.testing.assert_allclose(found.pop("output"), expected.detach(), rtol=1e-5, atol=1e-6)
    names = {f"{name}_updated": buffer for name, buffer in module.named_buffers()}
    assert set(found) == set(names)
    for name, buffer in names.items():
        np.testing.assert_allclose(found[name], buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "trained"),
    [
        ({}, {"0.bias", "1.weight", "1.bias"}),
        ({"frozen_params": ["1.*"]}, {"0.bias"}),
        ({"requires_grad": ["*.weight"]}, {"0.weight", "1.weight"}),
    ],
)
def test_which_parameters_are_trained(arguments: dict[str, Any], trained: set[str], tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].weight.requires_grad_(False)
    training_model_from_torch(
        module,
        gaussian(0, 2, 3),
        loss=nn.MSELoss(),
        example_targets=gaussian(1, 2, 2),
        artifact_directory=tmp_path,
        **arguments,
    )
    checkpoint = load_checkpoint(tmp_path / "checkpoint")
    assert set(checkpoint.parameters) == {name for name, _ in module.named_parameters()}
    assert set(checkpoint.parameters) - checkpoint.frozen == trained
    model = onnx.load(tmp_path / "training_model.onnx")
    assert [value.name for value in model.graph.input][:2] == ["input", "target"]
    assert {value.name for value in model.graph.output} >= {"loss", *(f"{name}_grad" for name in trained)}


def test_float64_and_a_loss_of_functions() -> None:
    class Loss(nn.Module):
        def forward(self, prediction: torch.Tensor, target: torch.Tensor, power: int = 2) -> torch.Tensor:
            return F.l1_loss(prediction, target).pow(power)

    module, x = nn.Linear(3, 2).double(), gaussian(0, 4, 3).double()
    target = gaussian(1, 4, 2).double()
    model = forward_model_from_torch(module, x, loss=Loss(), example_targets=(target, 3))
    expected = Loss()(module(x), target, 3).item()
    np.testing.assert_allclose(outputs(model, input=x, target=target)["loss"], expected, rtol=1e-12)
