"""The benchmark of training steps: what it compares, and what it prints."""

from __future__ import annotations

import pytest

from ort_ops import bench_step
from ort_ops.bench_step import Row


def test_candidates_take_the_same_steps_and_are_timed() -> None:
    row = bench_step.measure("MLP, 784-512-512-10, batch 128", 1, 1, candidates=("ours", "eager"))
    assert list(row.seconds) == list(row.peak_bytes) == ["ours", "eager"]
    assert all(0 < seconds < 10 for seconds in row.seconds.values())
    assert all(20e6 < peak < 4e9 for peak in row.peak_bytes.values())


def test_models_that_grow_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step, "GROWTH_FACTORS", (1,))
    rows = bench_step.measure_growth("tokens", 1, 1)
    assert [row.case for row in rows] == ["tokens 1"]
    assert 0 < rows[0].seconds["ours"] < 10 and 20e6 < rows[0].peak_bytes["ours"] < 4e9


def test_a_candidate_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)candidate 'export' failed:.*There is no such model"):
        bench_step.measure("no such model", 1, 1, candidates=("ours",))


def test_losses_that_disagree_are_refused() -> None:
    bench_step._check_losses({"eager": [2.0, 1.9], "ours": [2.0, 1.9001]})
    with pytest.raises(RuntimeError, match="ours has 1.8 at step 1, PyTorch 1.9"):
        bench_step._check_losses({"eager": [2.0, 1.9], "ours": [2.0, 1.8]})
    with pytest.raises(RuntimeError, match="compile has nan"):
        bench_step._check_losses({"eager": [2.0], "compile": [float("nan")]})


def test_the_table_gives_medians_ratios_and_memory() -> None:
    row = Row("a model", {"ours": 0.010, "eager": 0.020}, {"ours": 100_000_000, "eager": 250_000_000})
    assert bench_step.markdown([row]).splitlines() == [
        "| model | ours (ms) | eager (ms) | ours/eager | ours peak (MB) | eager peak (MB) |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a model | 10.00 | 20.00 | 0.50 | 100 | 250 |",
    ]


def test_the_table_of_growth_compares_with_the_first_of_each() -> None:
    rows = [
        Row(case, {"ours": seconds}, {"ours": 100_000_000})
        for case, seconds in [("layers 1", 0.01), ("layers 4", 0.04), ("batch 1", 0.02), ("batch 4", 0.1)]
    ]
    ratios = [line.split(" | ")[3] for line in bench_step.growth_markdown(rows).splitlines()[2:]]
    assert ratios == ["1.0", "4.0", "1.0", "5.0"]
