"""The CUDA kernels compiled for the host (emulation/cuda_runtime.h), behind the product's own C interface.

No GPU takes part. What this can show: right numbers on every launch path, and freedom from divergent
barriers, from uninitialised shared memory, from stray accesses, and from races that some order of the threads
brings to light. What it cannot: speed, and what a GPU's memory model allows beyond any order of whole steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from native import DATA_TYPES, KernelError, Library, Tensor

ROOT = Path(__file__).resolve().parents[2]
EMULATION = ROOT / "tests" / "cuda" / "emulation"
SOURCES = ROOT / "cpp" / "src"

# What the library consists of without ONNX Runtime and without the CPU's kernels.
LIBRARY_SOURCES = [
    ROOT / "tests" / "cuda" / "no_cpu_kernels.cc",
    ROOT / "tests" / "cuda" / "device_library.cu",
    *(SOURCES / f"{name}.cc" for name in ("executor", "executor_cuda", "last_error")),
    *(SOURCES / f"{name}.cc" for name in ("layer_norm_checks", "tensor_checks")),
    *(SOURCES / "add_layer_norm_grad" / f"{name}.cc" for name in ("cuda_plan", "plan", "problem")),
    *(kernels.with_name("c_api.cc") for kernels in sorted(SOURCES.glob("*/cuda.cu"))),
    SOURCES / "add_layer_norm_grad" / "cuda.cu",
    *(SOURCES / f"{name}.cu" for name in ("cuda_device", "cuda_kernels")),
]
EMULATED_SOURCES = [
    EMULATION / "emulator.cc",
    ROOT / "tests" / "cuda" / "emulated_library.cc",
    *LIBRARY_SOURCES,
]

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


def compile_emulated(sources: Sequence[Path], output: Path, *flags: str) -> Path:
    """Compiles .cc and .cu files for the host, with the emulation's headers, into a shared library."""
    compiler = os.environ.get("CXX", "c++")
    command = [
        *(
            compiler,
            "-std=c++17",
            "-O2",
            "-g1",
            "-fPIC",
            "-shared",
            "-Wall",
            "-Wextra",
            "-Wno-unknown-pragmas",
        ),
        "-fno-strict-aliasing",  # shared memory holds numbers of many types
        # A GPU's compiler fuses multiplications and additions; the bounds of the oracle hold either way.
        "-ffp-contract=off",
        *("-DORT_OPS_WITH_CUDA", '-DORT_OPS_VERSION="emulated"', '-DORT_OPS_CUDA_ARCHITECTURES="emulated"'),
        *(f"-I{EMULATION}", f"-I{SOURCES}", f"-I{ROOT / 'cpp' / 'include'}"),
        *flags,
        *("-x", "c++", *map(str, sources)),
        *("-o", str(output), "-ldl"),
    ]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, f"{' '.join(command)}\n{completed.stderr[-5000:]}"
    return output


@dataclass(frozen=True)
class Device:
    """The numbers of a device that a plan depends on."""

    multiprocessors: int
    shared_bytes_per_multiprocessor: int
    shared_bytes_per_block: int


HOPPER = Device(132, 228 << 10, 227 << 10)
AMPERE = Device(108, 164 << 10, 163 << 10)
ADA = Device(72, 100 << 10, 99 << 10)
TURING = Device(40, 64 << 10, 64 << 10)
# A few multiprocessors, so that each block has several rows although the emulation can afford few.
SMALL = Device(2, 228 << 10, 227 << 10)
SMALL_TURING = Device(2, 64 << 10, 64 << 10)
DEVICES = {"hopper": HOPPER, "ampere": AMPERE, "ada": ADA, "turing": TURING, "small": SMALL}

FORWARD, REVERSE, RANDOM, WARP_AHEAD = range(4)


class EmulatedLibrary(Library):
    """`Library` on the emulated device, with settings for the device and the order of the threads."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        for name in ("ort_ops_last_error", "emulation_take_launches", "emulation_plan"):
            getattr(library, name).restype = ctypes.c_char_p
        library.emulation_run_only_last_blocks.argtypes = [ctypes.c_longlong]
        library.emulation_plan.argtypes = [ctypes.c_longlong, ctypes.c_longlong, ctypes.c_int, ctypes.c_int]
        self._plan = library.ort_ops_add_layer_norm_grad_get_workspace_size
        self._plan.argtypes = [ctypes.POINTER(Tensor)] * 10 + [ctypes.c_void_p, ctypes.c_void_p]
        library.ort_ops_plan_on_cuda.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._compute = library.ort_ops_run_on_cuda
        self._compute.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        self._destroy = library.ort_ops_destroy_executor
        self._destroy.argtypes = [ctypes.c_void_p]
        self.use()

    def _planned_by(
        self, plan: Callable, tensors: Sequence[Tensor | None], attributes: Sequence[object] = ()
    ) -> tuple[int, ctypes.c_void_p]:
        _, executor = super()._planned_by(plan, tensors, attributes)
        workspace_bytes = ctypes.c_size_t()
        try:
            self._check(self._library.ort_ops_plan_on_cuda(executor, ctypes.byref(workspace_bytes)))
        except KernelError:
            self._destroy(executor)
            raise
        return workspace_bytes.value, executor

    def use(
        self, device: Device = SMALL, *, order: int = FORWARD, seed: int = 0, copies_at_wait: bool = True
    ) -> None:
        """Sets the device and the order in which threads run and their copies into shared memory land."""
        self._library.emulation_set_device(*vars(device).values())
        self._library.emulation_set_order(order, seed, int(copies_at_wait))

    @contextlib.contextmanager
    def only_last_blocks(self, count: int) -> Iterator[None]:
        """Of every grid runs only so many blocks, the last ones."""
        self._library.emulation_run_only_last_blocks(count)
        try:
            yield
        finally:
            self._library.emulation_run_only_last_blocks(2**63 - 1)

    def take_launches(self) -> list[str]:
        """The kernels launched since the last call, e.g. 'RowsInShared<float, 8>', in order."""
        lines = self._library.emulation_take_launches().decode().splitlines()
        return [re.sub(r"^.*?(\w+(<.*>)?)\(.*$", r"\1", re.sub(r"[a-z_]+::", "", line)) for line in lines]

    def plan(self, rows: int, cols: int, dtype, *, aligned: bool = True) -> dict[str, int]:
        """The plan for a shape on the device in use, by the names of cuda_plan.h."""
        text = self._library.emulation_plan(rows, cols, DATA_TYPES[dtype], int(not aligned)).decode()
        return {name: int(value) for name, value in (word.split("=") for word in text.split())}
