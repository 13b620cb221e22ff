"""The training loop: what it reports, that a resumed run gives the same bits, dropout included, and what it
refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_run

from ort_ops.training.artifacts import LossType, OptimType, generate_artifacts
from ort_ops.training.fit import fit, validation_mean
from ort_ops.training.metrics import StepMetrics

SETTINGS: dict[str, Any] = {"epochs": 4, "batch_size": 16, "learning_rate": lambda step: 0.02 / (1 + step)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    small_run.write_artifacts(folder)
    small_run.write_artifacts(folder / "dropout", small_run.DROPOUT_MODEL)
    return folder


def test_learns_and_reports_every_step(folder: Path) -> None:
    module, optimizer = small_run.open_run(folder)
    seen: list[StepMetrics] = []
    history = fit(
        module,
        optimizer,
        small_run.samples(200),
        epochs=12,
        batch_size=16,
        learning_rate=lambda step: 0.02,
        validation=small_run.samples(50, seed=2),
        on_step=seen.append,
    )
    assert seen == history
    assert [metrics.step for metrics in history] == list(range(1, 12 * 13 + 1))
    assert [metrics.epoch for metrics in history] == [1 + step // 13 for step in range(12 * 13)]
    assert [m.step for m in history if m.validation_loss is not None] == list(range(13, 157, 13))
    assert history[-1].validation_loss is not None
    assert history[-1].validation_loss < 0.5 < np.log(3) < history[0].training_loss
    assert all(metrics.samples_per_second > 0 for metrics in history)


def test_the_learning_rate_follows_the_step_number_across_a_resume(folder: Path, tmp_path: Path) -> None:
    rates = []
    for epochs in (2, 4):
        checkpoint = tmp_path / "checkpoint"
        module, optimizer = small_run.open_run(folder, checkpoint if epochs == 4 else None)
        history = fit(
            module,
            optimizer,
            small_run.samples(40),
            **SETTINGS | {"epochs": epochs},
            checkpoint_path=checkpoint,
        )
        rates += [metrics.learning_rate for metrics in history]
    assert rates == [0.02 / (1 + step) for step in range(12)]


@pytest.mark.parametrize("cut", [1, 3])
def test_a_resumed_run_ends_with_the_same_bytes_dropout_included(
    folder: Path, tmp_path: Path, cut: int
) -> None:
    samples, validation = small_run.samples(40), small_run.samples(10, seed=2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    module, optimizer = small_run.open_run(folder / "dropout")
    history = fit(module, optimizer, samples, **SETTINGS, validation=validation, checkpoint_path=whole)
    module, optimizer = small_run.open_run(folder / "dropout")
    fit(
        *(module, optimizer, samples),
        **SETTINGS | {"epochs": cut},
        validation=validation,
        checkpoint_path=parts,
    )
    # What else the process draws from the runtime's random numbers must not matter.
    module(small_run.samples(7))
    module, optimizer = small_run.open_run(folder / "dropout", parts)
    rest = fit(module, optimizer, samples, **SETTINGS, validation=validation, checkpoint_path=parts)
    assert parts.read_bytes() == whole.read_bytes()
    assert [(m.training_loss, m.validation_loss) for m in rest] == [
        (m.training_loss, m.validation_loss) for m in history[3 * cut :]
    ]


def test_dropout_is_drawn_anew_in_every_step_and_for_every_seed(folder: Path) -> None:
    def losses(seed: int) -> list[float]:
        module, optimizer = small_run.open_run(folder / "dropout")
        history = fit(
            *(module, optimizer, small_run.samples(16)),
            epochs=4,
            batch_size=16,
            learning_rate=lambda step: 0.0,
            seed=seed,
        )
        return [metrics.training_loss for metrics in history]

    # All samples in one batch and no learning: what differs is dropout alone.
    assert len({*losses(0), *losses(1)}) == 8
    assert losses(0) == losses(0)


def test_the_validation_loss_counts_every_sample_alike(folder: Path) -> None:
    module, _ = small_run.open_run(folder)
    samples = small_run.samples(10)
    module.eval()
    expected = float(module(samples))
    assert validation_mean(module, samples, batch_size=4) == pytest.approx(expected, rel=1e-6)
    first_eight = {name: array[:8] for name, array in samples.items()}
    module.eval()
    expected = float(module(first_eight))
    assert validation_mean(module, samples, batch_size=4, drop_rest=True) == pytest.approx(expected, rel=1e-6)


def test_a_model_that_returns_more_than_its_loss(tmp_path: Path) -> None:
    generate_artifacts(
        small_run.forward_model(),
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.SGD,
        artifact_directory=tmp_path,
        additional_output_names=["logits"],
    )
    module, optimizer = small_run.open_run(tmp_path)
    history = fit(module, optimizer, small_run.samples(40), **SETTINGS)
    assert history[-1].training_loss < history[0].training_loss


def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_checkpoint_kept(
    folder: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    module, optimizer = small_run.open_run(folder)
    samples = small_run.samples(40)
    fit(module, optimizer, samples, **SETTINGS | {"epochs": 1}, checkpoint_path=checkpoint)
    kept = checkpoint.read_bytes()
    samples["x"][3] = np.inf
    with pytest.raises(
        ArithmeticError, match=r"loss of step [456] \(epoch 2\) is nan; .* lower learning rate"
    ):
        fit(module, optimizer, samples, **SETTINGS, checkpoint_path=checkpoint)
    assert checkpoint.read_bytes() == kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 8}, "40 samples in batches of 16, seed 0; got 40 samples in batches of 8, seed 0"),
        ({"seed": 3}, "got 40 samples in batches of 16, seed 3. Use the same data, batch size and seed"),
        ({"epochs": 0}, "epochs must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"batch_size": 64, "drop_rest": True}, "a whole batch takes at least 64 samples; there are 40"),
        (
            {"drop_rest": True, "validation": small_run.samples(10)},
            "a whole batch of the validation takes at least 16 samples; there are 10",
        ),
    ],
)
def test_refuses(folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    samples = small_run.samples(40)
    module, optimizer = small_run.open_run(folder)
    fit(module, optimizer, samples, **SETTINGS | {"epochs": 1})
    before = small_run.parameters(module)
    with pytest.raises(ValueError, match=message):
        fit(module, optimizer, samples, **SETTINGS | change)
    for name, value in small_run.parameters(module).items():
        np.testing.assert_array_equal(value, before[name])
