"""The learning-rate schedules against PyTorch, at their corners and for values that make no sense."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ort_ops.training.schedule import constant_with_warmup, cosine_with_warmup, linear_with_warmup

SCHEDULES: list[Callable[..., float]] = [
    lambda step, **settings: constant_with_warmup(
        step, peak=settings["peak"], warmup_steps=settings["warmup_steps"]
    ),
    linear_with_warmup,
    cosine_with_warmup,
]
NAMES = ["constant", "linear", "cosine"]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_warmup_rises_linearly_and_never_gives_zero(schedule: Callable[..., float]) -> None:
    rates = [schedule(step, peak=4.0, total_steps=100, warmup_steps=4) for step in range(5)]
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_constant_stays() -> None:
    assert [constant_with_warmup(step, peak=0.5) for step in (0, 1, 10**9)] == [0.5] * 3


def test_linear_falls_in_equal_steps_and_stays_at_the_end() -> None:
    rates = [
        linear_with_warmup(step, peak=1.0, total_steps=6, warmup_steps=2, final=0.5) for step in range(9)
    ]
    assert rates == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("schedule", [linear_with_warmup, cosine_with_warmup], ids=NAMES[1:])
def test_a_run_of_warmup_alone_ends_at_the_final_rate(schedule: Callable[..., float]) -> None:
    rates = [schedule(step, peak=4.0, total_steps=2, warmup_steps=2, final=0.5) for step in range(4)]
    assert rates == [2.0, 4.0, 0.5, 0.5]


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
    schedulers = torch.optim.lr_scheduler
    references = {
        cosine_with_warmup: lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.05),
        linear_with_warmup: lambda optimizer: schedulers.LinearLR(
            optimizer, start_factor=1.0, end_factor=0.1, total_iters=30
        ),
    }
    for schedule, reference in references.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        scheduler = reference(optimizer)
        for step in range(31):
            # PyTorch computes each rate from the one before, so its rounding adds up over the steps.
            assert schedule(step, peak=0.5, total_steps=30, final=0.05) == pytest.approx(
                optimizer.param_groups[0]["lr"], rel=1e-13
            )
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize(
    ("schedule", "step", "settings", "message"),
    [
        (constant_with_warmup, -1, {}, "a step that is not negative; got -1"),
        (linear_with_warmup, -1, {"total_steps": 10}, "a step that is not negative; got -1"),
        (cosine_with_warmup, -1, {"total_steps": 10}, "a step that is not negative; got -1"),
        (constant_with_warmup, 0, {"warmup_steps": -1}, "warmup_steps must not be negative; got -1"),
        (
            linear_with_warmup,
            0,
            {"total_steps": 10, "warmup_steps": 11},
            r"linear_with_warmup: .* between 0 and total_steps \(10\); got 11",
        ),
        (
            cosine_with_warmup,
            0,
            {"total_steps": 10, "warmup_steps": -1},
            r"cosine_with_warmup: .* between 0 and total_steps \(10\); got -1",
        ),
    ],
)
def test_refuses_what_makes_no_sense(
    schedule: Callable[..., float], step: int, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(step, peak=1.0, **settings)
