"""The training loop: epochs of batches, validation and a checkpoint after each, the same bits again after a
resume."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.data import Arrays, sample_count, take, training_batches, validation_batches
from ort_ops.training.metrics import StepMetrics

if TYPE_CHECKING:
    from ort_ops.training.distributed import DataParallel

EPOCHS_DONE = "fit.epochs_done"
"""Property of the checkpoint that counts the epochs behind it."""

_SAME_BATCHES = "fit.batches"


def fit(
    module: Module,
    optimizer: Optimizer,
    samples: Arrays,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: Callable[[int], float],
    seed: int = 0,
    validation: Arrays | None = None,
    drop_rest: bool = False,
    checkpoint_path: str | os.PathLike[str] | None = None,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    parallel: DataParallel | None = None,
) -> list[StepMetrics]:
    """Train until `epochs` epochs are done, those before a resume included; returns what every step reported.

    module, optimizer: made from one artifact directory. A module whose state was loaded from a checkpoint of
        this function goes on behind its last epoch, and ends with the same bits as if it had not been
        interrupted.
    samples: arrays by the names of the module's inputs, of their types, with the samples along the first
        axis.
    batch_size: samples per step, of all ranks together.
    learning_rate: of update number `step`, the first being 0.
    seed: of the order of the samples and of dropout.
    validation: more samples, not trained on; their loss is computed after every epoch.
    drop_rest: leave out the last, smaller batch of an epoch (and of the validation), for models of a fixed
        batch size.
    checkpoint_path: written after every epoch.
    on_step: called with the metrics of every step.
    parallel: of this rank, when several train together; see `ort_ops.training.distributed`.

    Raises ValueError when the arguments do not fit together or do not continue the checkpoint, and
    ArithmeticError when the loss is no longer finite; the last checkpoint is then that of the last whole
    epoch.
    """
    state = module.state
    count = sample_count(samples)
    _check_arguments(epochs, batch_size)
    if drop_rest:
        for what, arrays in (("", samples), ("of the validation ", validation)):
            _check_whole_batch(what, arrays, batch_size)
    batches_text = f"{count} samples in batches of {batch_size}, seed {seed}"
    if parallel is not None:  # with another number of steps, ranks would wait for each other for ever
        parallel.check_same("epochs and batches", f"{epochs} epochs of {batches_text}")
    first_epoch = _resume(state, batches_text)
    history = []
    step = (first_epoch - 1) * len(training_batches(count, batch_size, seed, 1, drop_rest))
    for epoch in range(first_epoch, epochs + 1):
        module.train()
        batches = training_batches(count, batch_size, seed, epoch, drop_rest)
        for batch in batches:
            start = time.perf_counter()
            rate = learning_rate(step)
            optimizer.set_learning_rate(rate)
            _seed_dropout(seed, step, parallel)
            loss = _train_step(module, optimizer, samples, batch, parallel)
            seconds = time.perf_counter() - start
            step += 1
            if not math.isfinite(loss):
                raise ArithmeticError(
                    f"The loss of step {step} (epoch {epoch}) is {loss}; training has diverged. Try a lower "
                    "learning rate, a longer warm-up, or clipping of the gradients."
                )
            validation_loss = None
            if validation is not None and batch is batches[-1]:
                validation_loss = validation_mean(module, validation, batch_size, drop_rest, parallel)
            metrics = StepMetrics(step, epoch, loss, validation_loss, rate, len(batch) / seconds)
            history.append(metrics)
            on_step(metrics)
        # After the reports, so that who keeps them has those of all steps behind a checkpoint.
        state.properties[EPOCHS_DONE] = epoch
        _save(state, checkpoint_path, parallel)
    return history


def validation_mean(
    module: Module,
    samples: Arrays,
    batch_size: int,
    drop_rest: bool = False,
    parallel: DataParallel | None = None,
) -> float:
    """The mean loss of the evaluation model over `samples`; each batch counts by its size."""
    module.eval()
    total, counted = 0.0, 0
    for batch in validation_batches(sample_count(samples), batch_size, drop_rest):
        part = batch if parallel is None else parallel.share(batch)
        if len(part):
            total += _loss(module(take(samples, part))) * len(part)
            counted += len(part)
    module.train()
    if parallel is None:
        return total / counted
    return parallel.average(total / counted if counted else 0.0, counted)


def _train_step(
    module: Module, optimizer: Optimizer, samples: Arrays, batch: np.ndarray, parallel: DataParallel | None
) -> float:
    if parallel is None:
        loss = _loss(module(take(samples, batch)))
    else:
        part = parallel.share(batch)
        loss = _loss(module(take(samples, part))) if len(part) else 0.0
        loss = parallel.average_gradients(len(part), loss)
    optimizer.step()
    module.lazy_reset_grad()
    return loss


def _loss(results: Any) -> float:
    """A Module returns the loss alone or, with additional outputs, as the first of several."""
    return float(results[0] if isinstance(results, Sequence) else results)


def _seed_dropout(seed: int, step: int, parallel: DataParallel | None) -> None:
    """Start the random numbers of the runtime anew, for all sessions, so that they do not depend on the steps
    since the process began.

    Mixed into one number, because the runtime's streams of neighbouring seeds overlap.
    """
    rank = 0 if parallel is None else parallel.rank
    ort.set_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))


def _save(state: CheckpointState, path: str | os.PathLike[str] | None, parallel: DataParallel | None) -> None:
    if parallel is not None:
        parallel.check_equal()
    if path is not None and (parallel is None or parallel.rank == 0):
        CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)


def _resume(state: CheckpointState, batches: str) -> int:
    """The number of the first epoch to do. Raises ValueError if the epochs before had other batches."""
    if EPOCHS_DONE not in state.properties:
        state.properties[_SAME_BATCHES] = batches
        return 1
    if state.properties[_SAME_BATCHES] != batches:
        raise ValueError(
            "A resumed run must go on with the batches that it began with, "
            f"{state.properties[_SAME_BATCHES]}; got {batches}. Use the same data, batch size and seed."
        )
    return int(state.properties[EPOCHS_DONE]) + 1


def _check_arguments(epochs: int, batch_size: int) -> None:
    if epochs < 1:
        raise ValueError(f"fit: epochs must be at least 1; got {epochs}.")
    if batch_size < 1:
        raise ValueError(f"fit: batch_size must be at least 1; got {batch_size}.")


def _check_whole_batch(what: str, samples: Arrays | None, batch_size: int) -> None:
    if samples is not None and sample_count(samples) < batch_size:
        raise ValueError(
            f"fit: a whole batch {what}takes at least {batch_size} samples; there are "
            f"{sample_count(samples)}."
        )
