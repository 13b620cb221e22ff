"""Learning rates that follow the optimizer's own step count, so that a resumed run goes on where it was."""

from __future__ import annotations

from collections.abc import Callable

from ort_ops.training.api.optimizer import Optimizer
from ort_ops.training.schedule import constant_with_warmup, cosine_with_warmup


class LRScheduler:
    """Sets the optimizer's learning rate to `rate(updates made so far)`, at once and with every `step`."""

    def __init__(self, optimizer: Optimizer, rate: Callable[[int], float]) -> None:
        self._optimizer = optimizer
        self._rate = rate
        self.step()

    def step(self) -> None:
        """Set the rate of the next update. To be called after every `optimizer.step()`."""
        self._optimizer.set_learning_rate(self._rate(self._optimizer.step_count))


class LinearLRScheduler(LRScheduler):
    """From 0 up to `initial_lr` in `warmup_step_count` updates, then down to 0 at `total_step_count`.

    The rate after n updates is `initial_lr * n / warmup_step_count` in the warm-up (so the first update has a
    rate of 0 if there is one), then `initial_lr * (total_step_count - n) / (total_step_count -
    warmup_step_count)`, and 0 in the end. (onnxruntime-training 1.19 mixes up the two counts; here they are
    what they are called.)
    """

    def __init__(
        self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float
    ) -> None:
        _check_counts(warmup_step_count, total_step_count)

        def rate(step: int) -> float:
            if step < warmup_step_count:
                return initial_lr * step / warmup_step_count
            if step >= total_step_count:
                return 0.0
            return initial_lr * (total_step_count - step) / (total_step_count - warmup_step_count)

        super().__init__(optimizer, rate)


class CosineLRScheduler(LRScheduler):
    """Linear warm-up, then half a cosine from `initial_lr` to `final_lr`; see `cosine_with_warmup`."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
        final_lr: float = 0.0,
    ) -> None:
        _check_counts(warmup_step_count, total_step_count)
        super().__init__(
            optimizer,
            lambda step: cosine_with_warmup(
                step,
                peak=initial_lr,
                total_steps=total_step_count,
                warmup_steps=warmup_step_count,
                final=final_lr,
            ),
        )


class ConstantLRScheduler(LRScheduler):
    """Linear warm-up, then always `initial_lr`; see `constant_with_warmup`."""

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, initial_lr: float) -> None:
        super().__init__(
            optimizer,
            lambda step: constant_with_warmup(step, peak=initial_lr, warmup_steps=warmup_step_count),
        )


def _check_counts(warmup_step_count: int, total_step_count: int) -> None:
    if not 0 <= warmup_step_count <= total_step_count:
        raise ValueError(
            f"warmup_step_count must be between 0 and total_step_count ({total_step_count}); got "
            f"{warmup_step_count}."
        )
