"""The script for machines with a device, tried on the emulation: that it runs, and finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import ROOT

SCRIPT = ROOT / "tests" / "cuda" / "device_check.py"


def test_runs_through_and_reports(emulated_library_path: Path, tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--emulated", emulated_library_path, "--json", report_path]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    report = json.loads(report_path.read_text())
    assert all(0 < error <= 1 for error in report["numbers"].values())
    assert report["determinism"] is None
    assert {(row["dtype"], row["cols"]) for row in report["time"]} >= {("bfloat16", 64), ("float32", 16384)}
    assert report["operators"] == "ok"
    operators = {row["name"].split()[0] for row in report["operators' time"]}
    grads = {"GeluGrad", "ReluGrad", "CrossEntropyGrad", "EmbeddingGrad", "BatchNormGrad", "MaxPoolGrad"}
    assert operators == grads | {"AdamW", "AddLayerNorm", "CrossEntropy", "Attention", "AttentionGrad"}
    assert completed.stdout.count("of copy") == 2


def test_a_wrong_result_and_a_stray_write_are_found(emulated_library_path: Path, monkeypatch) -> None:
    import device_check
    from oracle import make_inputs

    device = device_check.Device(emulated_library_path)
    plain_run = device_check.Problem.run

    def wrong_run(problem, stream=None):
        results = plain_run(problem, stream)
        results["dx"].reshape(-1)[3] += 1
        return results

    with monkeypatch.context() as patch:
        patch.setattr(device_check.Problem, "run", wrong_run)
        with pytest.raises(AssertionError, match="dx: 1 of"):
            device_check.check_numbers(device, [(7, 8)])
    with device_check.norm_problem(device, make_inputs([7, 8])) as problem:
        device.fill(problem._buffers["dgamma"] + device_check.GUARD_BYTES + 8 * 4, 0, 1)
        with pytest.raises(AssertionError, match="a stray write around dgamma"):
            problem.run()
