"""`ort-ops bench step`: a whole training step (forward, backward, AdamW), side by side with PyTorch and,
where it is installed, with onnxruntime-training.

Every candidate is a process of its own (bench_worker.py), so that its memory can be told and so that none
pays for another's libraries. They take turns, in random order, on the same number of threads, and the medians
are compared: on shared machines only such ratios say anything. Before anything is timed their losses must
agree.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ort_ops import bench_worker

PEER = "onnxruntime-training"
CANDIDATES = ("ours", "eager", "compile")

# Steps that are compared before the timing. Rounding makes later losses drift apart. The peer's AdamW is
# another formula: it adds epsilon before it corrects the bias.
_COMPARED_STEPS = 3
_TOLERANCES = {"ours": 1e-4, "compile": 1e-4, PEER: 1e-2}

_TURN_SECONDS = 0.2
_REST_SECONDS = 2e-2

GROWTH_FACTORS = (1, 4, 16)


@dataclass(frozen=True)
class Row:
    """Median seconds of one step and peak memory, by candidate."""

    case: str
    seconds: dict[str, float]
    peak_bytes: dict[str, int]


class _Worker:
    """A candidate's process. It is prepared while the constructor runs."""

    def __init__(self, candidate: str, case: str, folder: Path, threads: int, python: str) -> None:
        self.candidate = candidate
        self._log = folder / f"{candidate}.log"
        command = [python, bench_worker.__file__, candidate, case, str(folder), str(threads)]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.peak_bytes = 0

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def steps(self, count: int) -> tuple[list[float], list[float]]:
        """Take `count` steps; returns their losses and seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{count}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"bench step: the candidate {self.candidate!r} failed:\n{tail}")
        answer = json.loads(line)
        self.peak_bytes = answer["peak_bytes"]
        return answer["losses"], answer["seconds"]


def measure(
    case: str,
    threads: int,
    rounds: int,
    candidates: Sequence[str] = CANDIDATES,
    peer_python: str | None = None,
) -> Row:
    """One row of the table.

    case: a key of bench_models.CASES.
    peer_python: the interpreter of an environment with onnxruntime-training and PyTorch; None leaves that
        candidate out.

    Raises RuntimeError when a candidate fails or when the losses disagree.
    """
    pythons = dict.fromkeys(candidates, sys.executable) | ({PEER: peer_python} if peer_python else {})
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)

        def start(candidate: str, python: str) -> _Worker:
            return stack.enter_context(_Worker(candidate, case, folder, threads, python))

        start("export", sys.executable).steps(0)
        workers = []
        losses = {}
        for candidate, python in pythons.items():
            workers.append(start(candidate, python))
            losses[candidate] = workers[-1].steps(_COMPARED_STEPS)[0]
        _check_losses(losses)
        seconds = _take_turns(workers, rounds)
        return Row(
            case,
            {worker.candidate: seconds[worker] for worker in workers},
            {worker.candidate: worker.peak_bytes for worker in workers},
        )


def measure_growth(grown: str, threads: int, rounds: int) -> list[Row]:
    """Rows of ours alone for the models of GROWTH_CASES[grown] by GROWTH_FACTORS, which take turns.

    Raises RuntimeError when one of them fails.
    """
    cases = [f"{grown} {times}" for times in GROWTH_FACTORS]
    with ExitStack() as stack:
        workers = []
        for case in cases:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for candidate in ("export", "ours"):
                worker = stack.enter_context(_Worker(candidate, case, folder, threads, sys.executable))
                worker.steps(0)
            workers.append(worker)
        seconds = _take_turns(workers, rounds)
        return [
            Row(case, {"ours": seconds[worker]}, {"ours": worker.peak_bytes})
            for case, worker in zip(cases, workers, strict=True)
        ]


def _take_turns(workers: Sequence[_Worker], rounds: int) -> dict[_Worker, float]:
    """The median seconds of a step of each."""
    counts = {worker: max(1, round(_TURN_SECONDS / min(worker.steps(3)[1]))) for worker in workers}
    seconds: dict[_Worker, list[float]] = {worker: [] for worker in workers}
    for _ in range(rounds):
        for worker in random.sample(workers, len(workers)):
            # The last candidate's threads wait for work in a loop for a while; they must not take this one's
            # processors.
            time.sleep(_REST_SECONDS)
            worker.steps(1)  # wakes its threads, fills the caches
            seconds[worker] += worker.steps(counts[worker])[1]
    return {worker: statistics.median(times) for worker, times in seconds.items()}


def _check_losses(losses: dict[str, list[float]]) -> None:
    reference = losses.get("eager")
    if reference is None:
        return
    for candidate, tolerance in _TOLERANCES.items():
        for step, (theirs, ours) in enumerate(zip(reference, losses.get(candidate, ()), strict=False)):
            if not abs(ours - theirs) <= tolerance * abs(theirs):
                raise RuntimeError(
                    f"bench step: the losses of every candidate must agree with PyTorch's to {tolerance}; "
                    f"{candidate} has {ours!r} at step {step}, PyTorch {theirs!r}."
                )


def markdown(rows: Sequence[Row]) -> str:
    """Medians, ratios of step times and memory of candidates that took turns, in Markdown."""
    others = [name for name in rows[0].seconds if name != "ours"]
    heads = [
        "model",
        "ours (ms)",
        *(f"{name} (ms)" for name in others),
        *(f"ours/{name}" for name in others),
        *(f"{name} peak (MB)" for name in ("ours", *others)),
    ]
    lines = [
        [
            row.case,
            *(f"{1e3 * row.seconds[name]:.2f}" for name in ("ours", *others)),
            *(f"{row.seconds['ours'] / row.seconds[name]:.2f}" for name in others),
            *(f"{row.peak_bytes[name] / 1e6:.0f}" for name in ("ours", *others)),
        ]
        for row in rows
    ]
    return _table(heads, lines)


def growth_markdown(rows: Sequence[Row]) -> str:
    """Step times of measure_growth's rows, in Markdown; the ratio is to the first of each."""
    first: dict[str, float] = {}
    lines = []
    for row in rows:
        grown, times = row.case.split()
        ours = row.seconds["ours"]
        ratio = ours / first.setdefault(grown, ours)
        lines.append(
            [grown, f"{times}x", f"{1e3 * ours:.2f}", f"{ratio:.1f}", f"{row.peak_bytes['ours'] / 1e6:.0f}"]
        )
    return _table(["what grows", "by", "ours (ms)", "ratio", "peak (MB)"], lines)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
