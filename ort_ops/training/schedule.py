"""Learning rates as plain functions of the step number, so that a resumed run continues on the same curve."""

from __future__ import annotations

import math


def cosine_with_warmup(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0, final: float = 0.0
) -> float:
    """Learning rate of update number `step` (the first is 0): linear warm-up, then half a cosine.

    The warm-up gives `peak * (step + 1) / warmup_steps`, so it never wastes a step on a rate of zero. After
    it

        final + (peak - final) * (1 + cos(pi * (step - warmup_steps) / (total_steps - warmup_steps))) / 2

    which starts at `peak` and reaches `final` at `total_steps`, where it stays (Loshchilov & Hutter 2017, one
    cycle).
    """
    if step < 0:
        raise ValueError(f"cosine_with_warmup: step must not be negative; got {step}.")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"cosine_with_warmup: warmup_steps must be between 0 and total_steps ({total_steps}); "
            f"got {warmup_steps}."
        )
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= total_steps:
        return final
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2
