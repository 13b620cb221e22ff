"""The CSV file of a run and its plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from ort_ops.training.metrics import MetricsFile, StepMetrics, plot_losses, read_metrics

RECORDS = [
    StepMetrics(1, 1, 0.1 + 0.2, None, 1e-3, 100.0),
    StepMetrics(2, 1, 1.5, 1 / 3, 1e-3, 90.0),
    StepMetrics(3, 2, 1.25, None, 5e-4, 80.0),
    StepMetrics(4, 2, 1.0, 2 / 3, 5e-4, 70.0),
]


def test_reads_back_every_bit_of_whole_epochs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path)
    for record in RECORDS:
        file.append(record)
    assert path.read_text().splitlines()[:3] == [
        "step,epoch,training_loss,validation_loss,learning_rate,samples_per_second",
        "1,1,0.30000000000000004,,0.001,100.0",
        "2,1,1.5,0.3333333333333333,0.001,90.0",
    ]
    assert read_metrics(path, epochs=2) == RECORDS
    assert read_metrics(path, epochs=1) == RECORDS[:2]
    assert read_metrics(path, epochs=0) == []


def test_a_resumed_file_begins_with_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("something else")
    file = MetricsFile(path, RECORDS[:2])
    assert read_metrics(path, epochs=9) == RECORDS[:2]
    file.append(RECORDS[2])
    assert read_metrics(path, epochs=9) == RECORDS[:3]
    with path.open("a") as text:
        text.write("4,2,1.")  # the machine went down here
    assert read_metrics(path, epochs=9) == RECORDS[:3]


def test_refuses_another_table(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        ValueError, match=r"The columns of '.*other.csv' must be step, epoch, .*; got \['a', 'b'\]"
    ):
        read_metrics(tmp_path / "other.csv", epochs=1)


def test_plots_the_validation_if_there_is_one(tmp_path: Path) -> None:
    plot_losses(RECORDS, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    for records, shown in ((RECORDS, True), (RECORDS[:1], False)):
        plot_losses(records, tmp_path / "losses.svg")
        drawing = (tmp_path / "losses.svg").read_text()
        assert "<!-- training -->" in drawing
        assert ("<!-- validation -->" in drawing) is shown
