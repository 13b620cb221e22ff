"""`ort-ops bench`: AddLayerNormGrad in a session, side by side with PyTorch and with the machine's
streaming floor.

All candidates of a row take turns, in random order, in one process and on the same number of threads,
and the medians are compared: on shared machines only such ratios say anything. Inputs and outputs of
the session are bound, so nothing is copied.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from ort_ops.library import load_library, register
from ort_ops.operators import ADD_LAYER_NORM_GRAD

SHAPES = ((4096, 4096), (8192, 1024), (2048, 16384), (65536, 64), (1024, 768), (8, 768))
ELEMENT_TYPES = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16}
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# A sample shorter than this is made of several calls, so that the clock and the wake-up of threads do not
# count.
_MIN_SAMPLE_SECONDS = 1e-2
_REST_SECONDS = 2e-2


@dataclass(frozen=True)
class Row:
    """One row of the table: median seconds of one call; errors relative to max|reference|."""

    rows: int
    cols: int
    dtype: str
    seconds: dict[str, float]
    dgamma_error: dict[str, float]
    dbeta_error: dict[str, float]


@dataclass(frozen=True)
class _Problem:
    dy: np.ndarray
    x1: np.ndarray
    x2: np.ndarray
    rstd: np.ndarray
    mean: np.ndarray
    gamma: np.ndarray
    dsum: np.ndarray

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """dgamma and dbeta in float64."""
        dgamma = np.zeros(self.dy.shape[1])
        dbeta = np.zeros(self.dy.shape[1])
        # In slices of rows: a float64 copy of everything would not fit beside the rest.
        for start in range(0, len(self.dy), 1024):
            part = slice(start, start + 1024)
            dy = self.dy[part].astype(np.float64)
            x = (self.x1[part] + self.x2[part]).astype(np.float64)
            dgamma += (dy * ((x - self.mean[part]) * self.rstd[part].astype(np.float64))).sum(axis=0)
            dbeta += dy.sum(axis=0)
        return dgamma, dbeta


def _make_problem(rows: int, cols: int, dtype: np.dtype) -> _Problem:
    rng = np.random.default_rng(0)

    def normal() -> np.ndarray:
        return rng.standard_normal((rows, cols), dtype=np.float32).astype(dtype)

    x1, x2 = normal(), normal()
    x = (x1 + x2).astype(np.float32)
    # Statistics that bfloat16 holds too: PyTorch takes them in the type of the data there.
    mean = x.mean(axis=1, keepdims=True).astype(dtype).astype(np.float32)
    rstd = (1 / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)).astype(dtype).astype(np.float32)
    return _Problem(normal(), x1, x2, rstd, mean, np.ones(cols, dtype), normal())


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins on a cache line, as tensors of ONNX Runtime and PyTorch do and NumPy's do not."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class _Session:
    """Our operator in a session, with inputs and outputs bound once."""

    def __init__(self, problem: _Problem, dtype: str, threads: int) -> None:
        element_type = ELEMENT_TYPES[dtype]
        names = list(vars(problem))
        types = {name: TensorProto.FLOAT if name in ("rstd", "mean") else element_type for name in names}
        shapes = {"dx": problem.dy.shape, "dgamma": problem.gamma.shape, "dbeta": problem.gamma.shape}
        output_types = {"dx": element_type, "dgamma": TensorProto.FLOAT, "dbeta": TensorProto.FLOAT}
        graph = helper.make_graph(
            [
                helper.make_node(
                    ADD_LAYER_NORM_GRAD.name, names, list(shapes), domain=ADD_LAYER_NORM_GRAD.domain
                )
            ],
            "bench",
            [
                helper.make_tensor_value_info(name, types[name], getattr(problem, name).shape)
                for name in names
            ],
            [
                helper.make_tensor_value_info(name, output_types[name], shape)
                for name, shape in shapes.items()
            ],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ADD_LAYER_NORM_GRAD.domain, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        register(options)
        self._session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._inputs = {name: _aligned(getattr(problem, name)) for name in names}
        for name, array in self._inputs.items():
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, types[name])
            self._binding.bind_ortvalue_input(name, value)
        self.outputs = {}
        for name, shape in shapes.items():
            self.outputs[name] = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), output_types[name])
            self._binding.bind_ortvalue_output(name, self.outputs[name])

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def parameter_gradients(self) -> tuple[np.ndarray, np.ndarray]:
        return self.outputs["dgamma"].numpy(), self.outputs["dbeta"].numpy()


class _Floor:
    """Reading four arrays of dy's size and writing one, with the better of plain and non-temporal stores."""

    def __init__(self, problem: _Problem, threads: int) -> None:
        self._threads = threads
        self._function = load_library().ort_ops_stream_floor_seconds
        self._function.restype = ctypes.c_double
        self._count = problem.dy.nbytes // 4 // 64 * 64
        # Ones: the system would back untouched zeros by one and the same page.
        self._memory = [np.ones(self._count + 16, np.float32) for _ in range(5)]
        addresses = [memory.ctypes.data + -memory.ctypes.data % 64 for memory in self._memory]
        self._arrays = (ctypes.c_void_p * 5)(*addresses)

    def seconds(self, passes: int, stream: bool) -> float:
        count = ctypes.c_int64(self._count)
        return self._function(self._arrays, count, self._threads, passes, int(stream))


def _torch_candidates(problem: _Problem, dtype: str, threads: int) -> dict[str, Callable[[], tuple]]:
    import torch

    torch.set_num_threads(threads)
    torch_dtype = getattr(torch, dtype)

    def tensor(array: np.ndarray, statistic: bool = False):
        if array.dtype == np.float32:
            return torch.from_numpy(array.copy()).to(torch_dtype if statistic else torch.float32)
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)

    dy, x1, x2, gamma, dsum = (tensor(getattr(problem, n)) for n in ("dy", "x1", "x2", "gamma", "dsum"))
    mean, rstd = tensor(problem.mean, True), tensor(problem.rstd, True)
    beta = torch.zeros_like(gamma)
    shape = [problem.dy.shape[1]]

    def backward(dy, x1, x2, mean, rstd, gamma, beta, dsum):
        x = x1 + x2
        dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
            dy, x, shape, mean, rstd, gamma, beta, [True, True, True]
        )
        # All three are returned: a compiler would drop what nobody reads.
        return dx + dsum, dgamma, dbeta

    arguments = (dy, x1, x2, mean, rstd, gamma, beta, dsum)
    compiled = torch.compile(backward, dynamic=False)

    def run(function: Callable) -> Callable[[], tuple]:
        def call() -> tuple:
            with torch.no_grad():
                return function(*arguments)

        return call

    return {"eager": run(backward), "compile": run(compiled)}


def _relative_error(actual: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(actual.astype(np.float64) - reference).max() / np.abs(reference).max())


def measure(rows: int, cols: int, dtype: str, threads: int, rounds: int) -> Row:
    """One row of the table. dtype: float32 or bfloat16."""
    problem = _make_problem(rows, cols, DTYPES[dtype])
    ours = _Session(problem, dtype, threads)
    floor = _Floor(problem, threads)
    calls: dict[str, Callable] = {"ours": ours, **_torch_candidates(problem, dtype, threads)}
    repeats = {}
    for name, call in calls.items():
        for _ in range(3):  # compiles, allocates, and fills the caches
            start = time.perf_counter()
            call()
        repeats[name] = max(1, round(_MIN_SAMPLE_SECONDS / (time.perf_counter() - start)))
    floor_passes = max(1, round(_MIN_SAMPLE_SECONDS / floor.seconds(3, True)))

    def sample(name: str) -> float:
        # The last candidate's threads wait for work in a loop for a while; they must not take this one's
        # processors.
        time.sleep(_REST_SECONDS)
        if name.startswith("floor"):
            return floor.seconds(floor_passes, name.endswith("stream"))
        for _ in range(-(-repeats[name] // 3)):  # wakes its own threads, fills the caches
            calls[name]()
        start = time.perf_counter()
        for _ in range(repeats[name]):
            calls[name]()
        return (time.perf_counter() - start) / repeats[name]

    samples: dict[str, list[float]] = {name: [] for name in (*calls, "floor", "floor stream")}
    for _ in range(rounds):
        for name in random.sample(list(samples), len(samples)):
            samples[name].append(sample(name))
    seconds = {name: statistics.median(times) for name, times in samples.items()}
    seconds["floor"] = min(seconds["floor"], seconds.pop("floor stream"))

    reference = problem.reference()
    theirs = [gradient.float().numpy() for gradient in calls["eager"]()[1:]]
    errors = [
        {"ours": _relative_error(our, exact), "eager": _relative_error(their, exact)}
        for our, their, exact in zip(ours.parameter_gradients(), theirs, reference, strict=True)
    ]
    return Row(rows, cols, dtype, seconds, *errors)


HEADINGS = (
    ("shape", "rows x cols"),
    ("dtype", ""),
    ("ours", "ms"),
    ("floor", "ms"),
    ("ours/floor", ""),
    ("eager/ours", ""),
    ("compile/ours", ""),
    ("dgamma", "ours | torch"),
    ("dbeta", "ours | torch"),
)


def cells(row: Row) -> list[str]:
    """The row's cells under HEADINGS."""
    ours, floor = row.seconds["ours"], row.seconds["floor"]
    # In a few microseconds the loop's own start is all there is to see.
    has_floor = row.rows * row.cols > 1 << 16
    return [
        f"{row.rows}x{row.cols}",
        row.dtype,
        f"{1e3 * ours:.3f}",
        f"{1e3 * floor:.3f}" if has_floor else "-",
        f"{ours / floor:.2f}" if has_floor else "-",
        f"{row.seconds['eager'] / ours:.1f}",
        f"{row.seconds['compile'] / ours:.1f}",
        *(f"{error['ours']:.1e} | {error['eager']:.1e}" for error in (row.dgamma_error, row.dbeta_error)),
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, for documents."""
    heads = [f"{name} ({unit})" if unit else name for name, unit in HEADINGS]
    # A cell's own bar would end it.
    lines = [[cell.replace(" | ", " / ") for cell in line] for line in (heads, *map(cells, rows))]
    lines.insert(1, ["---"] * len(heads))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def versions() -> str:
    """What was measured, in one line."""
    import torch

    return f"onnxruntime {ort.__version__}, onnx {onnx.__version__}, torch {torch.__version__}"
