"""Calls the kernels through the C interface, without ONNX Runtime, in buffers that show a stray write."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from oracle import Inputs

DATA_TYPES = {
    np.dtype(np.float32): 1,
    np.dtype(np.int32): 6,
    np.dtype(np.int64): 7,
    np.dtype(np.bool_): 9,
    np.dtype(np.float16): 10,
    np.dtype(ml_dtypes.bfloat16): 16,
}

SUCCESS = 0
WORKSPACE_TOO_SMALL = 1001
PARALLEL_FOR_FAILED = 1003
NULL_POINTER = 161001
INVALID_PARAMETER = 161002

# In the order of the C function's arguments.
TENSORS = ("dy", "x1", "x2", "rstd", "mean", "gamma", "dsum", "dx", "dgamma", "dbeta")
OUTPUTS = TENSORS[7:]

GUARD_BYTES = 256
GUARD_VALUE = 0xA5


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("data_type", ctypes.c_int32),
    ]


Task = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
Run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, Task, ctypes.c_void_p)


class ParallelFor(ctypes.Structure):
    _fields_ = [("run", Run), ("context", ctypes.c_void_p)]


class KernelError(Exception):
    """A status other than success."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def tensor(shape: Sequence[int], data_type: int, data: int | None = 64) -> Tensor:
    """A tensor whose data is never touched, for calls of phase one."""
    dims = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    return Tensor(data, dims, len(shape), data_type)


class Buffer:
    """Memory for one array between guards, beginning `offset_bytes` behind a 64-byte boundary."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, offset_bytes: int = 0) -> None:
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._memory = np.full(size + 2 * GUARD_BYTES + 128, GUARD_VALUE, np.uint8)
        start = GUARD_BYTES - self._memory.ctypes.data % 64 + 64 + offset_bytes
        self._before = self._memory[:start]
        self._after = self._memory[start + size :]
        self.array = self._memory[start : start + size].view(dtype).reshape(shape)

    def assert_guards(self, name: str) -> None:
        assert (self._before == GUARD_VALUE).all(), f"something was written before {name}"
        assert (self._after == GUARD_VALUE).all(), f"something was written behind {name}"


@dataclass
class Threads:
    """A parallel-for on real threads, which take the tasks in a shuffled order."""

    count: int
    seed: int = 0
    task_counts: list[int] = field(default_factory=list)

    def c_struct(self) -> ParallelFor:
        return ParallelFor(Run(self._run), None)

    def _run(self, _context: int | None, count: int, task: Callable, task_data: int | None) -> int:
        self.task_counts.append(count)
        order = list(range(count))
        random.Random(self.seed).shuffle(order)
        iterator = iter(order)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    index = next(iterator, None)
                if index is None:
                    return
                task(task_data, index)

        threads = [threading.Thread(target=work) for _ in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0


class Library:
    """The C interface of one shared library."""

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        for name in ("ort_ops_last_error", "ort_ops_version", "ort_ops_cpu_targets", "ort_ops_cpu_target"):
            getattr(library, name).restype = ctypes.c_char_p
        library.ort_ops_use_cpu_target.argtypes = [ctypes.c_char_p]
        self._plan = library.ort_ops_add_layer_norm_grad_get_workspace_size
        self._plan.argtypes = [ctypes.POINTER(Tensor)] * 10 + [ctypes.c_void_p, ctypes.c_void_p]
        self._compute = library.ort_ops_run_on_cpu
        self._compute.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        self._destroy = library.ort_ops_destroy_executor
        self._destroy.argtypes = [ctypes.c_void_p]

    @property
    def targets(self) -> list[str]:
        return self._library.ort_ops_cpu_targets().decode().split(",")

    @property
    def target(self) -> str:
        return self._library.ort_ops_cpu_target().decode()

    def use_target(self, name: str | None) -> None:
        self._check(self._library.ort_ops_use_cpu_target(name.encode() if name else None))

    def _check(self, status: int) -> None:
        if status != SUCCESS:
            raise KernelError(status, self._library.ort_ops_last_error().decode())

    def workspace_bytes(self, **tensors: Tensor) -> int:
        """Phase one alone."""
        workspace_bytes, executor = self._planned(tensors)
        self._destroy(executor)
        return workspace_bytes

    def _planned(self, tensors: dict[str, Tensor]) -> tuple[int, ctypes.c_void_p]:
        return self._planned_by(self._plan, [tensors.get(name) for name in TENSORS])

    def _planned_by(
        self, plan: Callable, tensors: Sequence[Tensor | None], attributes: Sequence[object] = ()
    ) -> tuple[int, ctypes.c_void_p]:
        workspace_bytes = ctypes.c_size_t()
        executor = ctypes.c_void_p()
        pointers = [None if tensor is None else ctypes.byref(tensor) for tensor in tensors]
        self._check(plan(*pointers, *attributes, ctypes.byref(workspace_bytes), ctypes.byref(executor)))
        return workspace_bytes.value, executor

    def run(
        self,
        inputs: Inputs,
        outputs: Sequence[str] = OUTPUTS,
        *,
        threads: Threads | None = None,
        offsets: dict[str, int] | None = None,
        in_place: str | None = None,
        workspace_fill: int = 0xFF,
        workspace_missing_bytes: int = 0,
        repeats: int = 1,
    ) -> dict[str, np.ndarray]:
        """Runs both phases and returns the wanted outputs.

        offsets: bytes by which a tensor's buffer is moved off its 64-byte boundary. in_place: the input whose
        buffer dx takes over. Before each run the workspace is filled with `workspace_fill`:
        0xFF bytes are NaN.
        """
        present = inputs.arrays()
        like = {"dx": inputs.dy, "dgamma": inputs.gamma, "dbeta": inputs.gamma}
        return self._run(
            self._plan,
            {name: present.get(name) for name in TENSORS[:7]},
            {
                name: (like[name].shape, inputs.dy.dtype if name == "dx" else np.dtype(np.float32))
                if name in outputs
                else None
                for name in OUTPUTS
            },
            threads=threads,
            offsets=offsets,
            in_place={} if in_place is None else {"dx": in_place},
            workspace_fill=workspace_fill,
            workspace_missing_bytes=workspace_missing_bytes,
            repeats=repeats,
        )

    def run_operator(
        self,
        name: str,
        inputs: Mapping[str, np.ndarray | None],
        outputs: Mapping[str, tuple[Sequence[int], np.dtype] | None],
        *attributes: object,
        **options,
    ) -> dict[str, np.ndarray]:
        """Runs both phases of an operator, called as in the C interface, e.g. "gelu_grad".

        inputs, outputs: in the order of the C function's arguments; None where left out; an output by its
        shape and type. attributes: ctypes values. options: as of `run`, but `in_place` maps outputs to
        inputs.
        """
        return self._run(self._plan_function(name), inputs, outputs, attributes, **options)

    def plan_operator(self, name: str, tensors: Sequence[Tensor | None], *attributes: object) -> int:
        """Phase one of an operator alone; returns the workspace's bytes."""
        size, executor = self._planned_by(self._plan_function(name), tensors, attributes)
        self._destroy(executor)
        return size

    def _plan_function(self, name: str) -> Callable:
        return getattr(self._library, f"ort_ops_{name}_get_workspace_size")

    def _run(
        self,
        plan: Callable,
        inputs: Mapping[str, np.ndarray | None],
        outputs: Mapping[str, tuple[Sequence[int], np.dtype] | None],
        attributes: Sequence[object] = (),
        *,
        threads: Threads | None = None,
        offsets: Mapping[str, int] | None = None,
        in_place: Mapping[str, str] | None = None,
        workspace_fill: int = 0xFF,
        workspace_missing_bytes: int = 0,
        repeats: int = 1,
    ) -> dict[str, np.ndarray]:
        offsets = offsets or {}
        in_place = in_place or {}
        arrays = {name: array for name, array in inputs.items() if array is not None}
        wanted = {name: shape for name, shape in outputs.items() if shape is not None}
        buffers = {}
        for name, array in arrays.items():
            buffers[name] = Buffer(array.shape, array.dtype, offsets.get(name, 0))
            buffers[name].array[...] = array
        for name, (shape, dtype) in wanted.items():
            source = in_place.get(name)
            buffers[name] = buffers[source] if source else Buffer(shape, dtype, offsets.get(name, 0))
        tensors = {
            name: tensor(buffer.array.shape, DATA_TYPES[buffer.array.dtype], buffer.array.ctypes.data)
            for name, buffer in buffers.items()
        }
        size, executor = self._planned_by(plan, [tensors.get(n) for n in (*inputs, *outputs)], attributes)
        try:
            workspace = Buffer([size], np.dtype(np.uint8))
            parallel_for = None if threads is None else threads.c_struct()
            pointer = None if parallel_for is None else ctypes.byref(parallel_for)
            for _ in range(repeats):
                workspace.array[...] = workspace_fill
                given = size - workspace_missing_bytes
                self._check(self._compute(workspace.array.ctypes.data, given, executor, pointer))
        finally:
            self._destroy(executor)
        workspace.assert_guards("the workspace")
        for name, buffer in buffers.items():
            buffer.assert_guards(name)
        for name, array in arrays.items():
            if name not in in_place.values():
                assert buffers[name].array.tobytes() == array.tobytes(), f"the input {name} was changed"
        return {name: buffers[name].array for name in wanted}
