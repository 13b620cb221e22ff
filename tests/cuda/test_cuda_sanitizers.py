"""The emulated kernels once more with AddressSanitizer and UndefinedBehaviorSanitizer.

They see any access outside of a tensor, of the workspace or of shared memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import EMULATED_SOURCES, ROOT, SANITIZE, compile_emulated

# Sanitized, all tests would take minutes. AddLayerNormGrad: every path, and every width of two types. The
# other operators: every shape, and every alignment.
TESTS = {
    ("test_cuda_kernels.py",): "every_kernel or no_rows or every_width and "
    "(float32-gamma or bfloat16-gamma_float32)",
    (
        *("test_cuda_elementwise.py", "test_cuda_rows.py", "test_cuda_embedding_grad.py"),
        *("test_cuda_max_pool_grad.py", "test_cuda_batch_norm_grad.py", "test_cuda_attention.py"),
    ): "anywhere or every_length or every_bit or number_of_classes or test_shapes or every_window or "
    "against_float64 or every_shape",
}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("sanitized") / "libemulated.so"
    return compile_emulated(EMULATED_SOURCES, output, "-O1", *SANITIZE)


def run_sanitized(command: list[str]) -> subprocess.CompletedProcess:
    compiler = os.environ.get("CXX", "c++")
    runtime = subprocess.check_output([compiler, "-print-file-name=libasan.so"], text=True).strip()
    assert Path(runtime).is_absolute(), (
        "the compiler has no libasan.so; install its sanitizer runtime (libasan)"
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,  # must be in the process before the interpreter that loads the library
        # The interpreter leaks on purpose; the fibers' stacks are not the thread's.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True, capture_output=True
    )


@pytest.mark.parametrize("files", TESTS, ids=["AddLayerNormGrad", "others"])
def test_kernels_run_clean(sanitized: Path, files: tuple[str, ...]) -> None:
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", TESTS[files], "--library", str(sanitized)]
    completed = run_sanitized(["-m", "pytest", *options, *(f"tests/cuda/{file}" for file in files)])
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-5000:]
    assert " passed" in completed.stdout and "skipped" not in completed.stdout


@pytest.mark.parametrize("name", ["dy", "x1", "x2", "dsum", "gamma", "mean", "rstd"])
@pytest.mark.parametrize("cols", [64, 33])
def test_a_stray_read_would_be_seen(sanitized: Path, name: str, cols: int) -> None:
    # An input one element shorter than its shape says.
    script = f"""
import sys
sys.path[:0] = ["tests", "tests/kernels", "tests/cuda"]
import ctypes, numpy, native, oracle
from emulated import EmulatedLibrary
library = EmulatedLibrary({str(sanitized)!r})
inputs = oracle.make_inputs([9, {cols}])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
arrays = dict(inputs.arrays(), dx=numpy.empty_like(inputs.dy))
tensors = {{}}
for name, array in arrays.items():
    size = array.nbytes - (4 if name == {name!r} else 0)
    memory = libc.malloc(ctypes.c_size_t(size))
    ctypes.memmove(memory, array.ctypes.data, size)
    tensors[name] = native.tensor(array.shape, 1, memory)
size, executor = library._planned(tensors)
workspace = numpy.empty(size + 16, numpy.uint8)
address = workspace.ctypes.data + -workspace.ctypes.data % 16
library._check(library._compute(address, size, executor, None))
"""
    completed = run_sanitized(["-c", script])
    assert completed.returncode != 0
    assert "heap-buffer-overflow" in completed.stderr and "READ of size" in completed.stderr, (
        completed.stderr[-3000:]
    )
