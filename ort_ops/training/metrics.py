"""What a training run reports: one record a step, kept in a CSV file that grows with the run, and drawn as
curves."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepMetrics:
    """One training step: number `step` (the first is 1) in epoch number `epoch` (the first is 1).

    validation_loss is there after the last step of an epoch, when there is something to validate on.
    """

    step: int
    epoch: int
    training_loss: float
    validation_loss: float | None
    learning_rate: float
    samples_per_second: float


_COLUMNS = [field.name for field in dataclasses.fields(StepMetrics)]


class MetricsFile:
    """The CSV file of a run: a header, then one line a step, each written as soon as it is known.

    kept: the lines to begin with: those of the steps before a resume.
    """

    def __init__(self, path: str | os.PathLike[str], kept: Iterable[StepMetrics] = ()) -> None:
        self._path = Path(path)
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(_COLUMNS)
            writer.writerows(_cells(metrics) for metrics in kept)
        os.replace(temporary, self._path)

    def append(self, metrics: StepMetrics) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(_cells(metrics))


def read_metrics(path: str | os.PathLike[str], epochs: int) -> list[StepMetrics]:
    """The records of the first `epochs` epochs in a run's CSV file; those of an epoch that was cut off are
    not wanted, as the run that is resumed repeats it.

    Raises FileNotFoundError when there is no file, ValueError when it is not such a file.
    """
    records = []
    with Path(path).open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != _COLUMNS:
            raise ValueError(
                f"The columns of '{path}' must be {', '.join(_COLUMNS)}; got {reader.fieldnames}."
            )
        for row in reader:
            if None in row.values() or int(row["epoch"]) > epochs:
                break
            records.append(_parse(row))
    return records


def plot_losses(records: Sequence[StepMetrics], path: str | os.PathLike[str]) -> None:
    """Draw the losses over the steps into a file whose ending says the kind (.png, .svg, .pdf). Needs
    matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    steps = [record.step for record in records]
    axes.plot(steps, [record.training_loss for record in records], linewidth=0.8, alpha=0.7, label="training")
    validations = [(r.step, r.validation_loss) for r in records if r.validation_loss is not None]
    if validations:
        axes.plot(*zip(*validations, strict=True), marker="o", label="validation")
        step, loss = validations[-1]
        axes.annotate(f"{loss:.4g}", (step, loss), textcoords="offset points", xytext=(0, 8), ha="right")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _cells(metrics: StepMetrics) -> list[str]:
    # repr gives every digit of a float, so that what is read again has the same bits.
    return ["" if value is None else repr(value) for value in dataclasses.astuple(metrics)]


def _parse(row: Mapping[str, str]) -> StepMetrics:
    return StepMetrics(
        step=int(row["step"]),
        epoch=int(row["epoch"]),
        training_loss=float(row["training_loss"]),
        validation_loss=float(row["validation_loss"]) if row["validation_loss"] else None,
        learning_rate=float(row["learning_rate"]),
        samples_per_second=float(row["samples_per_second"]),
    )
