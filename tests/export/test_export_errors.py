"""What cannot be exported is refused by name, with the line of Python and a way out; and what comes back must
fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ort_ops.export import ExportError, forward_model_from_torch, load_into_torch
from ort_ops.training.checkpoint import Checkpoint, save_checkpoint


class Calls(nn.Module):
    """Calls a function of itself and its input."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self._function = function

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return self._function(self, x)


def decides_by_value(module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return module.linear(x)
    return x


def test_python_that_decides_by_a_value_is_named_with_its_line() -> None:
    with pytest.raises(ExportError) as caught:
        forward_model_from_torch(Calls(decides_by_value), torch.ones(2, 3), training=True)
    message = str(caught.value)
    assert f"{Path(__file__).name}: if x.sum() > 0:" in message
    assert "Calls in training mode" in message
    assert "write it with torch.where" in message


def test_an_operator_without_a_form_in_onnx_is_named_with_its_line() -> None:
    module = Calls(lambda module, x: torch.linalg.eigh(x.T @ x)[0] + module.linear(x))
    with pytest.raises(
        ExportError, match=r"no form for aten\._linalg_eigh\.default \(.*test_export_errors\.py.*; use"
    ):
        forward_model_from_torch(module, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("part", "example", "message"),
    [
        (nn.InstanceNorm1d(3, track_running_stats=True), torch.ones(2, 3, 4), "running statistics cannot be"),
        (
            nn.Embedding(4, 3, scale_grad_by_freq=True),
            torch.ones(2, 3, dtype=torch.long),
            "scale_grad_by_freq",
        ),
    ],
)
def test_what_only_training_does_and_onnx_cannot(
    part: nn.Module, example: torch.Tensor, message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        forward_model_from_torch(part, example, training=True)


def test_a_size_that_the_module_fixes_cannot_be_dynamic() -> None:
    module = Calls(lambda module, x: module.linear(x).reshape(2, 3) + torch.ones(2, 1))
    with pytest.raises(ExportError, match="left out of dynamic_shapes"):
        forward_model_from_torch(module, torch.ones(2, 3))
    forward_model_from_torch(module, torch.ones(2, 3), dynamic_shapes={"x": {}})


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        (np.ones((2, 3)), {}, "must be a tensor, a tuple of arguments or a mapping.*numpy.ndarray"),
        ((np.ones((2, 3)),), {}, "'x' must be a tensor.*numpy.ndarray; torch.from_numpy makes it a tensor"),
        (([torch.ones(2, 3)],), {}, "'x' must be a tensor.*of type list; give its tensors one by one"),
        ({"y": torch.ones(2, 3)}, {}, "does not fit Calls.forward.*missing a required argument: 'x'"),
        (torch.ones(1, 3), {}, "axis 0 of the example 'x' has size 1.*at least 2"),
        (torch.ones(2, 3), {"dynamic_shapes": {"z": {0: "batch"}}}, "names 'z', which is no input.*'x'"),
        (torch.ones(2, 3), {"dynamic_shapes": {"x": {2: "depth"}}}, "axis 2 of 'x', whose 2 axes"),
        (torch.ones(2, 3), {"dynamic_shapes": {"x": {0: "a", 1: "a"}}}, "'a' has size 2.*and 3"),
        (
            torch.ones(2, 3),
            {"loss": nn.MSELoss(), "example_targets": {"y": torch.ones(2, 3)}},
            "example_targets does not fit MSELoss.forward",
        ),
        (torch.ones(2, 3), {"loss": nn.PReLU()}, "the loss PReLU has parameters of its own"),
    ],
)
def test_arguments_that_do_not_fit(example: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=re.compile(message, re.DOTALL)):
        forward_model_from_torch(Calls(lambda module, x: module.linear(x)), example, **arguments)


def test_a_module_that_returns_no_tensor() -> None:
    with pytest.raises(ExportError, match="Calls returns something of type NoneType with no tensor in it"):
        forward_model_from_torch(Calls(lambda module, x: None), torch.ones(2, 3))


def test_an_input_with_the_name_of_a_parameter() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.x

    with pytest.raises(ExportError, match="an input is called 'x', and so is another input or a tensor"):
        forward_model_from_torch(Clash(), torch.ones(2, 3))


def parameters() -> dict[str, np.ndarray]:
    return {"weight": np.ones((3, 3), np.float32), "bias": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (Checkpoint({**parameters(), "other": np.ones(1)}), "has 'other', which Linear does not"),
        (Checkpoint({"weight": parameters()["weight"]}), "lacks 'bias' of Linear.*strict=False"),
        (
            Checkpoint({**parameters(), "bias": np.ones(4, np.float32)}),
            r"'bias' of Linear must be torch.float32 \[3\]; the checkpoint has torch.float32 \[4\]",
        ),
        (Checkpoint({**parameters(), "bias": np.ones(3)}), "the checkpoint has torch.float64"),
        (Checkpoint(parameters(), nominal=True), "nominal: it holds shapes, but no values"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(checkpoint: Checkpoint, message: str) -> None:
    module = nn.Linear(3, 3)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_into_torch(module, checkpoint)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_what_a_checkpoint_lacks_may_stay(tmp_path: Path) -> None:
    module = nn.Linear(3, 3)
    bias = module.bias.detach().clone()
    save_checkpoint(tmp_path / "checkpoint", Checkpoint({"weight": parameters()["weight"]}))
    load_into_torch(module, tmp_path / "checkpoint", strict=False)
    assert torch.equal(module.bias, bias)
    assert torch.equal(module.weight, torch.ones(3, 3))


def test_bfloat16_comes_back() -> None:
    import ml_dtypes

    module = nn.Linear(3, 3, dtype=torch.bfloat16)
    values = {name: (value / 3).astype(ml_dtypes.bfloat16) for name, value in parameters().items()}
    load_into_torch(module, Checkpoint(values))
    assert torch.equal(module.bias, torch.full((3,), 1 / 3, dtype=torch.bfloat16))
