"""The kernel tests once more, on a library built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, **environment: str) -> str:
    completed = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert completed.returncode == 0, (
        f"{command} ended with {completed.returncode}:\n{completed.stdout[-5000:]}"
    )
    return completed.stdout


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("sanitizers")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    # Without CUDA: nvcc's host code is not what is tested here.
    run("cmake", "-S", "cpp", "-B", build, *generator, "-DORT_OPS_SANITIZE=ON", "-DORT_OPS_CUDA=OFF")
    run("cmake", "--build", build, "--parallel", "2")
    return build / "libort_ops.so"


def runtime_library() -> str:
    """AddressSanitizer must be in the process before the interpreter that loads the library."""
    name = run(os.environ.get("CXX", "c++"), "-print-file-name=libasan.so").strip()
    assert Path(name).is_absolute(), "the compiler has no libasan.so; install its sanitizer runtime (libasan)"
    return name


def environment() -> dict[str, str]:
    # The interpreter's own leaks are not ours to report.
    return {
        "LD_PRELOAD": runtime_library(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def test_kernels_run_clean(sanitized: Path) -> None:
    here = Path(__file__)
    tests = [file for file in sorted(here.parent.glob("test_*.py")) if file != here]
    output = run(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *tests,
        "--library",
        sanitized,
        **environment(),
    )
    assert " passed" in output and "skipped" not in output


def test_the_sanitizer_would_see_a_stray_read(sanitized: Path) -> None:
    # An input one element shorter than its shape says.
    script = """
import sys
sys.path[:0] = ["tests", "tests/kernels"]
import ctypes, native, oracle
library = native.Library(sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
dims, row = [4, 100], [4, 1]
tensors = {name: native.tensor(dims, 1, libc.malloc(1600)) for name in ("x1", "dx")}
tensors["dy"] = native.tensor(dims, 1, libc.malloc(1596))
tensors.update({name: native.tensor(row, 1, libc.malloc(16)) for name in ("rstd", "mean")})
tensors["gamma"] = native.tensor([100], 1, libc.malloc(400))
_, executor = library._planned(tensors)
library._compute(None, 0, executor, None)
"""
    completed = subprocess.run(
        [sys.executable, "-c", script, str(sanitized)],
        cwd=ROOT,
        env={**os.environ, **environment()},
        text=True,
        capture_output=True,
    )
    assert completed.returncode != 0
    assert "heap-buffer-overflow" in completed.stderr
