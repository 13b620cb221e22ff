"""The learning-rate schedule against its closed form, at its corners and for values that make no sense."""

from __future__ import annotations

import math

import pytest

from ort_ops.training.schedule import cosine_with_warmup


def test_warmup_rises_linearly_and_never_gives_zero() -> None:
    rates = [cosine_with_warmup(step, peak=4.0, total_steps=100, warmup_steps=4) for step in range(4)]
    assert rates == [1.0, 2.0, 3.0, 4.0]


def test_cosine_passes_through_known_points() -> None:
    def rate(step: int) -> float:
        return cosine_with_warmup(step, peak=1.0, total_steps=110, warmup_steps=10, final=0.2)

    # A cosine from 1 to 0.2 over 100 steps: its start, a third (cos 60 degrees = 1/2), its middle, its end.
    assert rate(10) == 1.0
    assert cosine_with_warmup(10, peak=1.0, total_steps=40, warmup_steps=0, final=0.2) == pytest.approx(
        0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, rel=1e-15
    )
    assert rate(60) == pytest.approx(0.6, rel=1e-15)
    assert rate(110) == 0.2
    assert rate(1000) == 0.2


def test_agrees_with_pytorch_over_a_whole_run() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.05)
    for step in range(31):
        expected = optimizer.param_groups[0]["lr"]
        # PyTorch computes each rate from the one before, so its rounding adds up over the steps.
        assert cosine_with_warmup(step, peak=0.5, total_steps=30, final=0.05) == pytest.approx(
            expected, rel=1e-13
        )
        optimizer.step()
        cosine.step()


@pytest.mark.parametrize(
    ("step", "total", "warmup", "message"),
    [
        (-1, 10, 0, "step must not be negative; got -1"),
        (0, 10, 11, r"between 0 and total_steps \(10\); got 11"),
    ],
)
def test_refuses_what_makes_no_sense(step: int, total: int, warmup: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosine_with_warmup(step, peak=1.0, total_steps=total, warmup_steps=warmup)
