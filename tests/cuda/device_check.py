"""Checks and times the CUDA kernels on a real device.

    python tests/cuda/device_check.py [--json FILE]

It needs nvcc, Python, NumPy and ml_dtypes, and nothing of a network: it compiles what it needs for the device
that is there. In order:

1. numbers: AddLayerNormGrad in every type, presence and shape class against the float64 oracle, with guards
   around every buffer
2. operators: the others, by the tests of their CPU kernels (which need pytest and SciPy), with guards as well
3. determinism: 100 runs with the same bits, on two streams
4. compute-sanitizer (if found): memcheck, racecheck, synccheck and initcheck on small shapes
5. time: AddLayerNormGrad against a device-to-device copy of the same bytes, as a replayed CUDA graph, and
   against PyTorch, eager and compiled (if found); the others against such a copy and as a graph
6. ONNX Runtime (if its CUDA provider and ort_ops are installed): bound inputs, 200 runs, the default and a
   given stream

and then prints two tables and, with --json, writes the same as JSON. It ends with 1 if anything was wrong; a
missing tool is told, and is no error. With --emulated LIBRARY it runs 1, 2, 3 and 5 in small on the host's
emulation, to try this script itself: those times mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "kernels"), str(TESTS / "cuda")]

import numpy as np  # noqa: E402
from emulated import LIBRARY_SOURCES, ROOT, SOURCES  # noqa: E402
from native import DATA_TYPES, OUTPUTS, TENSORS, Library, tensor  # noqa: E402
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, Inputs, assert_matches, make_inputs  # noqa: E402

GUARD_BYTES = 256
GUARD_VALUE = 0xA5

TYPE_PAIRS = [(FLOAT, FLOAT), (FLOAT16, FLOAT16), (FLOAT16, FLOAT), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT)]
SMALL_SHAPES = [(7, 8), (77, 64), (9, 768), (5, 2048), (5, 8192), (3, 16384), (5, 33), (2, 20001), (3, 16392)]
SHAPES = [
    *SMALL_SHAPES,
    *((100003, 64), (20011, 100), (8191, 256), (4099, 512), (4096, 768), (4096, 1000)),
    (3001, 1024),
    *((2048, 1600), (1024, 2048), (1024, 3072), (1031, 4096), (600, 5120)),
    *((515, 8192), (300, 12288), (263, 16384)),
    *((1, 4096), (8, 8192), (2, 200003), (64, 65536), (4096, 1), (3000, 131)),
]  # fmt: skip

# (rows, cols, dtype): 256 MiB for each tensor, far beyond any cache.
TIMED_COLS = (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384)
TIMED_BYTES = 256 << 20
# Of a copy's bandwidth: what is wanted of these widths.
WANTED = {cols: 0.9 if 512 <= cols <= 8192 else 0.8 for cols in TIMED_COLS}


class Device:
    """The product's C interface and a little of the CUDA runtime, in one library compiled for this device."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        library.device_error.restype = library.ort_ops_last_error.restype = ctypes.c_char_p
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.device_allocate.argtypes = [ctypes.POINTER(pointer), size]
        library.device_free.argtypes = [pointer]
        library.device_copy.argtypes = [pointer, pointer, size]
        library.device_fill.argtypes = [pointer, ctypes.c_int, size]
        library.device_create_stream.argtypes = [ctypes.POINTER(pointer)]
        tail = [pointer, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_float)]
        library.device_time_copy.argtypes = [pointer, pointer, size, *tail]
        library.device_time_operator.argtypes = [pointer, size, pointer, *tail]
        library.device_time_graph.argtypes = [pointer, size, pointer, *tail]
        library.ort_ops_plan_on_cuda.argtypes = [pointer, pointer]
        self._compute = library.ort_ops_run_on_cuda
        self._compute.argtypes = [pointer, size, pointer, pointer]
        library.ort_ops_destroy_executor.argtypes = [pointer]

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(*arguments) != 0:
            raise RuntimeError(f"{name}: {self._library.device_error().decode()}")

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"status {status}: {self._library.ort_ops_last_error().decode()}")

    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self._check(self._library.ort_ops_cuda_device(text, ctypes.c_size_t(len(text))))
        return text.value.decode()

    def plan(self, operator: str, *arguments: object) -> tuple[int, ctypes.c_void_p]:
        """(the bytes of workspace, the executor), for the C function's arguments up to those."""
        workspace_bytes, executor = ctypes.c_size_t(), ctypes.c_void_p()
        phase_one = getattr(self._library, f"ort_ops_{operator}_get_workspace_size")
        self._check(phase_one(*arguments, ctypes.byref(workspace_bytes), ctypes.byref(executor)))
        self._check(self._library.ort_ops_plan_on_cuda(executor, ctypes.byref(workspace_bytes)))
        return workspace_bytes.value, executor

    def allocate(self, count: int) -> int:
        memory = ctypes.c_void_p()
        self._call("device_allocate", ctypes.byref(memory), max(count, 1))
        return int(memory.value or 0)

    def free(self, memory: int) -> None:
        self._call("device_free", memory)

    def write(self, memory: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self._call("device_copy", memory, array.ctypes.data, array.nbytes)

    def read(self, memory: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = np.empty(shape, dtype)
        self._call("device_copy", array.ctypes.data, memory, array.nbytes)
        return array

    def fill(self, memory: int, value: int, count: int) -> None:
        self._call("device_fill", memory, value, count)

    def synchronize(self) -> None:
        self._call("device_synchronize")

    def create_stream(self) -> int | None:
        stream = ctypes.c_void_p()
        self._call("device_create_stream", ctypes.byref(stream))
        return stream.value

    def time(self, what: str, *arguments: object, stream: int | None, repeats: int, samples: int) -> float:
        """Median seconds of one call."""
        milliseconds = ctypes.c_float()
        self._call(f"device_time_{what}", *arguments, stream, repeats, samples, ctypes.byref(milliseconds))
        return milliseconds.value * 1e-3


class Problem:
    """The tensors of one call in device memory, each between guards, and its plan.

    operator, inputs, outputs, attributes, offsets, in_place: as of `native.Library.run_operator`.
    """

    def __init__(
        self,
        device: Device,
        operator: str,
        inputs: Mapping[str, np.ndarray | None],
        outputs: Mapping[str, tuple[Sequence[int], np.dtype] | None],
        attributes: Sequence[object] = (),
        offsets: Mapping[str, int] | None = None,
        in_place: Mapping[str, str] | None = None,
    ) -> None:
        self._device = device
        self._in_place = in_place or {}
        self._arrays = {name: np.asarray(array) for name, array in inputs.items() if array is not None}
        self._outputs = {name: shape for name, shape in outputs.items() if shape is not None}
        self._memory: list[int] = []
        self._buffers: dict[str, int] = {}  # where the guard before a tensor begins
        for name, array in self._arrays.items():
            self._allocate(name, array.nbytes, (offsets or {}).get(name, 0))
        for name, (shape, dtype) in self._outputs.items():
            if name in self._in_place:
                self._buffers[name] = self._buffers[self._in_place[name]]
            else:
                size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                self._allocate(name, size, (offsets or {}).get(name, 0))
        shapes = {name: (array.shape, array.dtype) for name, array in self._arrays.items()} | self._outputs
        tensors = {
            name: tensor(shape, DATA_TYPES[dtype], self._buffers[name] + GUARD_BYTES)
            for name, (shape, dtype) in shapes.items()
        }
        pointers = [ctypes.byref(tensors[name]) if name in tensors else None for name in (*inputs, *outputs)]
        self.workspace_bytes, self.executor = device.plan(operator, *pointers, *attributes)
        self.workspace = device.allocate(self.workspace_bytes)

    def _allocate(self, name: str, size: int, offset: int) -> None:
        room = size + 2 * GUARD_BYTES + offset
        self._memory.append(self._device.allocate(room))
        self._device.fill(self._memory[-1], GUARD_VALUE, room)
        self._buffers[name] = self._memory[-1] + offset

    def __enter__(self) -> Problem:
        return self

    def __exit__(self, *_: object) -> None:
        self._device._library.ort_ops_destroy_executor(self.executor)
        for memory in [*self._memory, self.workspace]:
            self._device.free(memory)

    def write_inputs(self) -> None:
        for name, array in self._arrays.items():
            self._device.write(self._buffers[name] + GUARD_BYTES, array)

    def run(self, stream: int | None = None) -> dict[str, np.ndarray]:
        """The outputs, after the guards and the inputs were found as they were."""
        self.write_inputs()
        self._device.fill(self.workspace, 0xFF, self.workspace_bytes)
        self._device.synchronize()
        self._device._check(
            self._device._compute(self.workspace, self.workspace_bytes, self.executor, stream)
        )
        self._device.synchronize()
        for name, array in self._arrays.items():
            if name not in self._in_place.values():
                data = self._read(name, array.shape, array.dtype)
                assert data.tobytes() == array.tobytes(), f"the input {name} was changed"
        return {name: self._read(name, shape, dtype) for name, (shape, dtype) in self._outputs.items()}

    def _read(self, name: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        whole = self._device.read(self._buffers[name], (size + 2 * GUARD_BYTES,), np.dtype(np.uint8))
        before, data, after = np.split(whole, [GUARD_BYTES, GUARD_BYTES + size])
        assert (before == GUARD_VALUE).all() and (after == GUARD_VALUE).all(), f"a stray write around {name}"
        return np.frombuffer(data.tobytes(), dtype).reshape(shape).copy()


def norm_problem(device: Device, inputs: Inputs) -> Problem:
    """One call of AddLayerNormGrad."""
    arrays = inputs.arrays()
    sums = (inputs.gamma.shape, FLOAT)
    outputs = {"dx": (inputs.dy.shape, inputs.dy.dtype), "dgamma": sums, "dbeta": sums}
    return Problem(device, "add_layer_norm_grad", {name: arrays.get(name) for name in TENSORS[:7]}, outputs)


class DeviceLibrary(Library):
    """`Library.run_operator` on the device, for the tests of the CPU's kernels."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._library = device._library

    def run_operator(self, name, inputs, outputs, *attributes, threads=None, **options):
        with Problem(self._device, name, inputs, outputs, attributes, **options) as problem:
            return problem.run()


def compile_for_device(output: Path) -> Path:
    command = [
        *("nvcc", "-std=c++17", "-O3", "-arch=native", "-shared", "-Xcompiler=-fPIC", "--cudart=static"),
        *("-DORT_OPS_WITH_CUDA", '-DORT_OPS_VERSION="device-check"'),
        *('-DORT_OPS_CUDA_ARCHITECTURES="native"'),
        *("-I", str(SOURCES), "-I", str(ROOT / "cpp" / "include")),
        *map(str, LIBRARY_SOURCES),
        *("-o", str(output)),
    ]
    subprocess.run(command, check=True)
    return output


def check_numbers(device: Device, shapes: list[tuple[int, int]]) -> dict[str, float]:
    """The largest error of each output, in units of its bound."""
    worst = dict.fromkeys(OUTPUTS, 0.0)
    for i, shape in enumerate(shapes):
        for j, (dtype, gamma_dtype) in enumerate(TYPE_PAIRS):
            presence = [(True, True), (False, True), (True, False), (False, False)][(i + j) % 4]
            inputs = make_inputs(
                shape, dtype, gamma_dtype=gamma_dtype, x2=presence[0], dsum=presence[1], seed=i
            )
            with norm_problem(device, inputs) as problem:
                for name, error in assert_matches(inputs, **problem.run()).items():
                    worst[name] = max(worst[name], error)
    return worst


def check_operators(device: Device) -> str:
    """The tests of the CPU's kernels that hold for any device, on this one."""
    try:
        import test_adamw
        import test_add_layer_norm
        import test_attention
        import test_batch_norm_grad
        import test_cross_entropy
        import test_embedding_grad
        import test_gelu_grad
        import test_max_pool_grad
        import test_relu_grad
    except ImportError as error:
        return f"not run: {error}"
    library = DeviceLibrary(device)
    forms, wide = test_gelu_grad.FORMS, (np.int32, np.int64)
    for dtype in DTYPES:
        for form in forms:
            test_gelu_grad.test_every_x(library, dtype, form)
            test_gelu_grad.test_non_finite_values(library, dtype, form)
        test_relu_grad.test_every_bit_pattern(library, dtype)
        test_add_layer_norm.test_a_mean_far_from_zero(library, dtype)
        test_add_layer_norm.test_non_finite_values_stay_in_their_row(library, dtype)
    for dtype, gamma_dtype in TYPE_PAIRS:
        test_add_layer_norm.test_every_width(library, dtype, gamma_dtype)
    for form in ("pytorch", "hugging_face"):
        for optional in (True, False):
            test_adamw.test_every_length(library, form, optional)
    test_adamw.test_an_update_that_is_skipped_keeps_every_bit(library)
    for dtype in wide:
        test_cross_entropy.test_every_number_of_classes(library, dtype)
        for shapes in (((7,), (3, 5)), ((0,), (4, 6)), ((300,), (1, 129)), ((64, 8), (5000, 300))):
            test_embedding_grad.test_shapes(library, dtype, *shapes)
    test_cross_entropy.test_non_finite_scores(library)
    for shape in test_batch_norm_grad.SHAPES:
        for offset in (0, 1000):
            test_batch_norm_grad.test_against_float64(library, shape, offset)
    test_batch_norm_grad.test_a_constant_channel(library)
    for case in test_max_pool_grad.CASES.values():
        for values in ("ties", "NaN", "infinite"):
            test_max_pool_grad.test_every_window(library, case, values)
    for visibility in ("all", "causal"):
        for shape in test_attention.SHAPES:
            test_attention.test_every_shape(library, shape, visibility)
    test_attention.test_hidden_keys_count_for_nothing_and_a_row_without_keys_is_nan(library)
    return "ok"


def check_determinism(device: Device, shapes: list[tuple[int, int]], runs: int) -> None:
    streams = [None, device.create_stream()]
    for shape in shapes:
        for dtype in DTYPES:
            with norm_problem(device, make_inputs(shape, dtype)) as problem:
                first = problem.run()
                for i in range(runs - 1):
                    for name, array in problem.run(streams[i % 2]).items():
                        assert array.tobytes() == first[name].tobytes(), f"{name} of {shape} {dtype} differs"


def run_sanitizers(library: Path) -> dict[str, str]:
    """The last line of each tool, or why it did not run."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"compute-sanitizer": "not found"}
    results = {}
    for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
        command = [
            program,
            f"--tool={tool}",
            "--error-exitcode=9",
            sys.executable,
            __file__,
            "--small",
            str(library),
        ]
        completed = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in (completed.stdout + completed.stderr).splitlines() if line.strip()]
        if "Device not supported" in completed.stdout + completed.stderr:
            return {"compute-sanitizer": "does not know this device"}
        if completed.returncode != 0:
            raise RuntimeError(f"{tool} ended with {completed.returncode}: " + "\n".join(lines[-40:]))
        results[tool] = lines[-1]
    return results


def torch_seconds(rows: int, cols: int, dtype: np.dtype, samples: int) -> dict[str, float]:
    """Median seconds of PyTorch's eager and compiled backward of LayerNorm(x1 + x2), plus dsum."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    kind = {FLOAT: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}[dtype]
    dy, x1, x2, dsum = (torch.randn(rows, cols, device="cuda", dtype=kind) for _ in range(4))
    gamma = torch.ones(cols, device="cuda", dtype=kind)
    x = (x1 + x2).float()
    mean = x.mean(1, keepdim=True)
    rstd = (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    del x

    def backward(dy, x1, x2, dsum, mean, rstd, gamma):
        grads = torch.ops.aten.native_layer_norm_backward(
            dy, x1 + x2, [cols], mean, rstd, gamma, gamma, [True, True, True]
        )
        return grads[0] + dsum, grads[1], grads[2]

    torch._dynamo.reset()  # or it would stop compiling after a few shapes
    seconds = {}
    for name, function in (("torch eager", backward), ("torch.compile", torch.compile(backward))):
        arguments = (dy, x1, x2, dsum, mean, rstd, gamma)
        for _ in range(3):
            function(*arguments)
        times = []
        for _ in range(samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function(*arguments)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        seconds[name] = float(np.median(times))
    return seconds


def repeat_row(inputs: Inputs, rows: int) -> Inputs:
    """The only row of the inputs, so many times; no time is spent on random numbers."""
    tables = {name: array for name, array in inputs.arrays().items() if name != "gamma"}
    repeated = {name: np.broadcast_to(array, (rows, *array.shape[1:])) for name, array in tables.items()}
    return Inputs(gamma=inputs.gamma, **repeated)


def time_shapes(device: Device, tensor_bytes: int, samples: int) -> list[dict]:
    stream = device.create_stream()
    rows_of_table = []
    for dtype in (BFLOAT16, FLOAT):
        for cols in TIMED_COLS:
            rows = max(1, tensor_bytes // (cols * dtype.itemsize))
            inputs = repeat_row(make_inputs((1, cols), dtype), rows)
            moved = 5 * rows * cols * dtype.itemsize
            with norm_problem(device, inputs) as problem:
                problem.write_inputs()
                arguments = (problem.workspace, problem.workspace_bytes, problem.executor)
                options = {"stream": stream, "repeats": 3, "samples": samples}
                seconds = {
                    "operator": device.time("operator", *arguments, **options),
                    "graph": device.time("graph", *arguments, **options),
                }
            # A copy that reads and writes as many bytes in all, within as much memory.
            source, target = (device.allocate(moved // 2) for _ in range(2))
            seconds["copy"] = device.time("copy", target, source, moved // 2, **options)
            device.free(source)
            device.free(target)
            try:
                seconds |= torch_seconds(rows, cols, dtype, samples)
            except RuntimeError as error:  # its trouble is not the operator's
                print(f"PyTorch, {rows} x {cols} {dtype}: {error}", flush=True)
            case = {"dtype": str(dtype), "rows": rows, "cols": cols, "bytes": moved, "wanted": WANTED[cols]}
            rows_of_table.append({**case, "seconds": seconds})
    return rows_of_table


@dataclass(frozen=True)
class TimedCall:
    """A call to be timed. Bytes: each tensor once; operations: multiplications and additions, where they and
    not the bytes decide."""

    name: str
    operator: str
    inputs: dict[str, np.ndarray | None]
    outputs: dict[str, tuple[Sequence[int], np.dtype]]
    attributes: tuple[object, ...] = ()
    operations: float = 0.0

    @property
    def bytes(self) -> int:
        written = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.outputs.values())
        return written + sum(array.nbytes for array in self.inputs.values() if array is not None)


def timed_calls(tensor_bytes: int) -> Iterator[TimedCall]:
    """Each operator once, or in a few types, with tensors of about so many bytes."""
    rng = np.random.default_rng(0)

    def values(shape: Sequence[int], dtype: np.dtype = FLOAT) -> np.ndarray:
        return np.resize(rng.standard_normal(10007).astype(dtype), shape)  # no time is spent on more

    for dtype in (BFLOAT16, FLOAT):
        count = tensor_bytes // dtype.itemsize
        flat = {"dy": values([count], dtype), "x": values([count], dtype)}
        for form in ("none", "tanh"):
            outputs = {"dx": ((count,), dtype)}
            yield TimedCall(f"GeluGrad {form} {dtype}", "gelu_grad", flat, outputs, (form.encode(),))
        inputs = {"dy": flat["dy"], "y": flat["x"]}
        yield TimedCall(f"ReluGrad {dtype}", "relu_grad", inputs, outputs)
        for cols in (768, 4096):
            rows = max(1, count // cols)
            table, row = ((rows, cols), dtype), ((rows, 1), FLOAT)
            inputs = {"x1": values(table[0], dtype), "x2": values(table[0], dtype)}
            inputs |= {"gamma": values([cols], dtype), "beta": values([cols], dtype)}
            outputs = {"y": table, "mean": row, "rstd": row, "x": table}
            name = f"AddLayerNorm {cols} {dtype}"
            yield TimedCall(name, "add_layer_norm", inputs, outputs, (ctypes.c_float(1e-5),))
    count = tensor_bytes // 4
    names = ("parameter", "gradient", "first_moment", "second_moment")
    state = {name: np.abs(values([count])) for name in names}
    names = ("gradient_weight", "square_weight", "step_size", "inverse_root", "decay")
    scalars = {name: np.ones((), FLOAT) for name in names}
    names = ("parameter_updated", "first_moment_updated", "second_moment_updated")
    outputs = {name: ((count,), FLOAT) for name in names}
    numbers = (b"pytorch", *(ctypes.c_float(value) for value in (0.9, 0.999, 1e-8)))
    yield TimedCall("AdamW", "adamw", {**state, **scalars, "update": None}, outputs, numbers)
    classes = 50257
    rows = max(1, count // classes)
    scores, labels = values((rows, classes)), rng.integers(0, classes, rows)
    row = ((rows,), FLOAT)
    ignored = (ctypes.c_int64(-100),)
    inputs = {"scores": scores, "labels": labels}
    yield TimedCall("CrossEntropy", "cross_entropy", inputs, {"row_loss": row, "log_sum_exp": row}, ignored)
    inputs = {"drow_loss": values([rows]), "scores": scores, "labels": labels, "log_sum_exp": values([rows])}
    outputs = {"dscores": (scores.shape, FLOAT)}
    yield TimedCall("CrossEntropyGrad", "cross_entropy_grad", inputs, outputs, ignored)
    tokens = max(1, count // 768 // 8)
    table = ((max(1, count // 768), 768), FLOAT)
    indices = rng.integers(0, table[0][0], tokens)
    # Of the table nothing but the shape is read.
    inputs = {"dy": values((tokens, 768)), "indices": indices, "table": np.zeros(table[0], FLOAT)}
    yield TimedCall("EmbeddingGrad", "embedding_grad", inputs, {"dtable": table})
    batch = max(1, count // (64 * 56 * 56))
    images = (batch, 64, 56, 56)
    inputs = {"dy": values(images), "x": values(images), "scale": values([64])}
    outputs = {"dx": (images, FLOAT), "dscale": ((64,), FLOAT), "dbias": ((64,), FLOAT)}
    yield TimedCall("BatchNormGrad", "batch_norm_grad", inputs, outputs, (ctypes.c_float(1e-5),))
    window = (ctypes.c_int64 * 9)(2, 2, 2, 2, 0, 0, 0, 0, 0)  # OrtOpsPoolWindow
    inputs = {"dy": values((batch, 64, 28, 28)), "x": values(images)}
    yield TimedCall("MaxPoolGrad", "max_pool_grad", inputs, {"dx": (images, FLOAT)}, (ctypes.byref(window),))
    length = min(1024, max(8, count // 1024))
    shape = (max(1, count // (length * 16 * 64) // 8), length, 16, 64)
    pairs = shape[0] * 16 * length**2 / 2  # of queries and keys, causal
    query = values(shape)
    operands = {"query": query, "key": query, "value": query, "mask": None}
    sums = ((shape[0], 16, length), FLOAT)
    scale = (ctypes.c_float(1 / 8), b"causal")
    outputs = {"y": (shape, FLOAT), "log_sum_exp": sums}
    yield TimedCall("Attention", "attention", operands, outputs, scale, 2 * 2 * 64 * pairs)
    inputs = {"dy": query, **operands, "y": query, "log_sum_exp": np.full(sums[0], 9, FLOAT)}
    outputs = {name: (shape, FLOAT) for name in ("dquery", "dkey", "dvalue")}
    yield TimedCall("AttentionGrad", "attention_grad", inputs, outputs, scale, 2 * 5 * 64 * pairs)


def time_operators(device: Device, tensor_bytes: int, samples: int) -> list[dict]:
    options = {"stream": device.create_stream(), "repeats": 3, "samples": samples}
    rows = []
    for call in timed_calls(tensor_bytes):
        with Problem(device, call.operator, call.inputs, call.outputs, call.attributes) as problem:
            problem.write_inputs()
            arguments = (problem.workspace, problem.workspace_bytes, problem.executor)
            seconds = {name: device.time(name, *arguments, **options) for name in ("operator", "graph")}
        source, target = (device.allocate(call.bytes // 2) for _ in range(2))
        seconds["copy"] = device.time("copy", target, source, call.bytes // 2, **options)
        device.free(source)
        device.free(target)
        facts = {"name": call.name, "bytes": call.bytes, "operations": call.operations}
        rows.append({**facts, "seconds": seconds})
    return rows


def operators_table(rows: list[dict]) -> str:
    lines = [f"{'operator':<28} {'operator us':>12} {'graph us':>12} {'copy us':>12}  of copy  TB/s  TFLOP/s"]
    for row in rows:
        seconds = row["seconds"]
        cells = " ".join(f"{seconds[name] * 1e6:12.1f}" for name in ("operator", "graph", "copy"))
        share, speed = seconds["copy"] / seconds["operator"], row["bytes"] / seconds["operator"] / 1e12
        flops = f"{row['operations'] / seconds['operator'] / 1e12:7.2f}" if row["operations"] else ""
        lines.append(f"{row['name']:<28} {cells}  {share:7.0%}  {speed:4.2f}  {flops}")
    return "\n".join(lines)


def run_in_sessions(device: Device) -> str:
    """200 runs in ONNX Runtime on the device, on the runtime's own stream and as many on a given one."""
    try:
        import onnxruntime

        import ort_ops
        from ort_ops.operators import embed_functions
    except ImportError as error:
        return f"not run: {error}"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "not run: this ONNX Runtime has no CUDA provider"
    from operator_models import make_model

    for dtype in (FLOAT, FLOAT16):  # NumPy's own types, which a binding takes
        inputs = make_inputs((333, 768), dtype)
        results = set()
        for stream in (None, device.create_stream()):
            options = onnxruntime.SessionOptions()
            ort_ops.register(options)
            # Without a fallback: a node that CUDA does not take is an error.
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            provider_options = {} if stream is None else {"user_compute_stream": str(stream)}
            session = onnxruntime.InferenceSession(
                embed_functions(make_model(inputs)).SerializeToString(),
                options,
                [("CUDAExecutionProvider", provider_options)],
            )
            binding = session.io_binding()
            for name, array in inputs.arrays().items():
                binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
            for output in session.get_outputs():
                binding.bind_output(output.name, "cuda")
            for _ in range(200):
                session.run_with_iobinding(binding)
                binding.synchronize_outputs()
                arrays = binding.copy_outputs_to_cpu()
                results.add(b"".join(array.tobytes() for array in arrays))
            assert_matches(inputs, **dict(zip(OUTPUTS, arrays, strict=True)))
        assert len(results) == 1, f"{len(results)} different results of 400 runs of {dtype}"
    return "ok: 200 runs each on the runtime's and on a given stream, all with the same bits"


def table(rows: list[dict]) -> str:
    names = ["operator", "graph", "copy", "torch eager", "torch.compile"]
    lines = [
        f"{'dtype':<9} {'rows':>8} {'cols':>6}  " + "  ".join(f"{name + ' us':>16}" for name in names)
        + "   of copy  wanted  TB/s"
    ]  # fmt: skip
    for row in rows:
        seconds = row["seconds"]
        cells = (f"{seconds[name] * 1e6:16.1f}" if name in seconds else f"{'-':>16}" for name in names)
        share = seconds["copy"] / seconds["operator"]
        speed = row["bytes"] / seconds["operator"] / 1e12
        lines.append(
            f"{row['dtype']:<9} {row['rows']:>8} {row['cols']:>6}  " + "  ".join(cells)
            + f"   {share:6.0%}   {row['wanted']:5.0%}  {speed:4.2f}"
        )  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results as JSON")
    parser.add_argument(
        "--emulated", type=Path, metavar="LIBRARY", help="try this script itself, without a device"
    )
    parser.add_argument("--small", type=Path, metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        check_numbers(Device(options.small), SMALL_SHAPES)
        check_operators(Device(options.small))
        return 0

    report: dict[str, object] = {}
    failed = False

    def step(name: str, action: Callable[[], object]) -> None:
        nonlocal failed
        try:
            report[name] = action()
        except Exception as error:
            report[name] = f"FAILED: {error}"
            failed = True
        if not isinstance(report[name], list):
            print(f"{name}: {report[name] or 'ok'}", flush=True)

    if not options.emulated and shutil.which("nvidia-smi") is None:
        parser.error("no CUDA device: nvidia-smi, which comes with the driver, is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libdevice_check.so"
        if options.emulated:
            device = Device(options.emulated)
            step("numbers", lambda: check_numbers(device, SMALL_SHAPES))
            step("determinism", lambda: check_determinism(device, [(77, 64)], 3))
            step("operators", lambda: check_operators(device))
            step("time", lambda: time_shapes(device, 1 << 15, 1))
            step("operators' time", lambda: time_operators(device, 1 << 15, 1))
        else:
            if shutil.which("nvcc") is None:
                parser.error("nvcc is not on the PATH; it comes with the CUDA toolkit")
            device = Device(compile_for_device(library))
            report["device"] = device.name()
            print(report["device"], flush=True)
            step("numbers", lambda: check_numbers(device, SHAPES))
            step("operators", lambda: check_operators(device))
            step(
                "determinism", lambda: check_determinism(device, [(4099, 512), (515, 8192), (3000, 131)], 100)
            )
            step("sanitizers", lambda: run_sanitizers(library))
            step("time", lambda: time_shapes(device, TIMED_BYTES, 15))
            step("operators' time", lambda: time_operators(device, TIMED_BYTES, 15))
            step("ONNX Runtime", lambda: run_in_sessions(device))
    for name, in_rows in (("time", table), ("operators' time", operators_table)):
        if isinstance(report[name], list):
            print(in_rows(report[name]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
