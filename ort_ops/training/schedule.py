"""Learning rates as plain functions of the step number, so that a resumed run continues on the same curve.

All warm up alike: `peak * (step + 1) / warmup_steps`, which never wastes a step on a rate of zero. `step` is
the number of updates made so far, 0 for the first.
"""

from __future__ import annotations

import math


def constant_with_warmup(step: int, *, peak: float, warmup_steps: int = 0) -> float:
    """Linear warm-up, then always `peak`."""
    _check_step(step)
    if warmup_steps < 0:
        raise ValueError(f"constant_with_warmup: warmup_steps must not be negative; got {warmup_steps}.")
    return _warmup(step, peak, warmup_steps) if step < warmup_steps else peak


def linear_with_warmup(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> float:
    """Linear warm-up, then a straight line from `peak` to `final`, which it reaches at `total_steps` and
    where it stays.
    """
    _check_step(step)
    _check_steps("linear_with_warmup", warmup_steps, total_steps)
    if step < warmup_steps:
        return _warmup(step, peak, warmup_steps)
    return final + (peak - final) * (1 - _progress(step, warmup_steps, total_steps))


def cosine_with_warmup(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> float:
    """Linear warm-up, then half a cosine from `peak` to `final`:

        final + (peak - final) * (1 + cos(pi * (step - warmup_steps) / (total_steps - warmup_steps))) / 2

    which reaches `final` at `total_steps`, where it stays (Loshchilov & Hutter 2017, one cycle).
    """
    _check_step(step)
    _check_steps("cosine_with_warmup", warmup_steps, total_steps)
    if step < warmup_steps:
        return _warmup(step, peak, warmup_steps)
    progress = _progress(step, warmup_steps, total_steps)
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


def _warmup(step: int, peak: float, warmup_steps: int) -> float:
    return peak * (step + 1) / warmup_steps


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """How much of the way after the warm-up is done, from 0 to 1."""
    return 1.0 if step >= total_steps else (step - warmup_steps) / (total_steps - warmup_steps)


def _check_step(step: int) -> None:
    if step < 0:
        raise ValueError(f"A learning rate is asked for a step that is not negative; got {step}.")


def _check_steps(who: str, warmup_steps: int, total_steps: int) -> None:
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"{who}: warmup_steps must be between 0 and total_steps ({total_steps}); got {warmup_steps}."
        )
