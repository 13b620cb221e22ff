"""Sessions with the plugin registered, and what the tests of its kernels ask of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from operator_models import make_model, run_session
from oracle import Inputs

import ort_ops

# onnxruntime-extensions imports both where they are installed, which takes seconds and changes nothing here.
WITHOUT_TORCH_AND_TRANSFORMERS = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
TESTS = Path(__file__).resolve().parent.parent


def plugin_session(
    model: onnx.ModelProto, *, threads: int = 1, options: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    """A CPU session with the plugin. (A model without function bodies loads only with its kernels.)"""
    options = options or onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    ort_ops.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def run_kernel(
    inputs: Inputs, outputs: tuple[str, ...] = ("dx", "dgamma", "dbeta"), *, threads: int = 1, **model_options
) -> dict[str, np.ndarray]:
    """The kernel's results for these inputs, from a session of one node."""
    return run_session(
        plugin_session(make_model(inputs, outputs, **model_options), threads=threads), inputs.arrays()
    )


def executed_operators(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> Counter[str]:
    """How often each operator ran, read from the runtime's own profile."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = os.path.join(folder, "profile")
        session = plugin_session(model, options=options)
        run_session(session, inputs)
        events = json.loads(Path(session.end_profiling()).read_text())
    return Counter(
        event["args"]["op_name"]
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    )


def memory_bytes(field: str, file: str = "/proc/self/status") -> int:
    """A figure of Linux about memory: VmRSS (in use by this process), VmHWM (the most so far), VmSize (its
    address space), VmPeak (the most so far), MemAvailable.

    (resource.getrusage would not do: a new process inherits its parent's maximum.)
    """
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise LookupError(f"{file} has no field {field}")


def run_script(
    script: str, *arguments: str, timeout_seconds: float = 120, **options
) -> subprocess.CompletedProcess:
    """Runs Python code in a process of its own, which a hang or a crash would not outlive."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH_AND_TRANSFORMERS + script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env=environment,
        **options,
    )
