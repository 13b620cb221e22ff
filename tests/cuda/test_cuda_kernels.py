"""AddLayerNormGrad's CUDA kernels, emulated, against the float64 oracle.

Every launch path, type, width, presence and alignment; no GPU takes part (emulated.py).
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from emulated import (
    ADA,
    FORWARD,
    HOPPER,
    RANDOM,
    REVERSE,
    SMALL,
    SMALL_TURING,
    WARP_AHEAD,
    Device,
    EmulatedLibrary,
)
from native import (
    DATA_TYPES,
    INVALID_PARAMETER,
    NULL_POINTER,
    OUTPUTS,
    WORKSPACE_TOO_SMALL,
    KernelError,
    Tensor,
    tensor,
)
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, assert_matches, make_inputs
from sparse_memory import SparseMemory

TYPE_PAIRS = [(FLOAT, FLOAT), (FLOAT16, FLOAT16), (FLOAT16, FLOAT), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT)]
TYPE_IDS = [f"{dtype}-gamma_{gamma}" for dtype, gamma in TYPE_PAIRS]

# Around the 16-byte pieces, the warp, each number of columns per thread and each block size, and the longest
# row in shared memory.
COLS = [
    *range(1, 18),
    *(31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 256, 264, 512, 513, 520),
    *(768, 769, 1000, 1024, 1032, 1600, 2048, 2056, 3072, 4096, 4104, 6144),
    *(8192, 8200, 16384, 16385, 16392, 32768, 65537),
]
# The shared memory of a block, in KiB, decides about the stages and the tensors in them.
SHARED_DEVICES = {
    "small": SMALL,
    "small_turing": SMALL_TURING,
    "one_multiprocessor": Device(1, 100 << 10, 99 << 10),
    "hopper": HOPPER,
}


def assert_same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in actual.items():
        assert array.tobytes() == expected[name].tobytes(), f"{name} differs"


def rows_for(cols: int) -> int:
    """Several for each block of a small device, and none that divides evenly."""
    return 77 if cols <= 64 else 23 if cols <= 1024 else 7


@pytest.mark.parametrize(("dtype", "gamma_dtype"), TYPE_PAIRS, ids=TYPE_IDS)
def test_every_width(library: EmulatedLibrary, dtype: np.dtype, gamma_dtype: np.dtype) -> None:
    for cols in COLS:
        inputs = make_inputs([rows_for(cols), cols], dtype, gamma_dtype=gamma_dtype, seed=cols)
        assert_matches(inputs, **library.run(inputs))


def test_every_kernel_is_run_and_no_other(library: EmulatedLibrary) -> None:
    library.take_launches()
    for dtype, cols in itertools.product(DTYPES, (64, 65, 4096, 8192, 32768)):
        library.run(make_inputs([9, cols], dtype))
    names = {FLOAT: "float", FLOAT16: "__half", BFLOAT16: "__nv_bfloat16"}
    expected = {"AddParts"}
    for dtype, name in names.items():
        expected |= {f"RowsInShared<{name}, {cols}>" for cols in (8, 16, 32)}
        expected |= {
            f"{k}<{name}, {n}>" for k in ("RowSums", "ColumnTiles") for n in (1, 16 // dtype.itemsize)
        }
    assert set(library.take_launches()) == expected


@pytest.mark.parametrize("device", SHARED_DEVICES.values(), ids=SHARED_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_arrangement_of_shared_memory(
    library: EmulatedLibrary, dtype: np.dtype, device: Device
) -> None:
    library.use(device)
    for cols in (64, 520, 1024, 2048, 4096, 8192, 16384):
        for x2, dsum in ((True, True), (False, True), (True, False)):
            inputs = make_inputs([rows_for(cols), cols], dtype, x2=x2, dsum=dsum, seed=cols)
            assert_matches(inputs, **library.run(inputs))


def test_the_devices_above_cover_every_number_of_stages_and_staged_tensors(library: EmulatedLibrary) -> None:
    arrangements = set()
    for device, dtype, cols in itertools.product(SHARED_DEVICES.values(), DTYPES, COLS):
        library.use(device)
        plan = library.plan(rows_for(cols), cols, dtype)
        arrangements.add((plan["stages"], plan["staged_tensors"]))
    assert {stages for stages, _ in arrangements} == {0, 1, 2, 3}
    assert {tensors for _, tensors in arrangements} == {0, 2, 3, 4}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [[77, 64], [23, 520], [23, 1024], [9, 4096], [9, 8192], [23, 16392], [41, 33], [2, 20001]],
    ids=str,
)
def test_the_order_of_threads_and_copies_does_not_show(
    library: EmulatedLibrary, dtype: np.dtype, shape: list[int]
) -> None:
    inputs = make_inputs(shape, dtype)
    forward = library.run(inputs)
    assert_matches(inputs, **forward)
    for copies_at_wait in (True, False):
        for order, seed in ((FORWARD, 0), (REVERSE, 0), (RANDOM, 1), (WARP_AHEAD, 2), (WARP_AHEAD, 3)):
            library.use(SMALL, order=order, seed=seed, copies_at_wait=copies_at_wait)
            assert_same_bits(library.run(inputs), forward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x2", [True, False], ids=["x2", "no_x2"])
@pytest.mark.parametrize("dsum", [True, False], ids=["dsum", "no_dsum"])
def test_every_subset_of_outputs(library: EmulatedLibrary, dtype: np.dtype, x2: bool, dsum: bool) -> None:
    for shape in ([70, 37], [77, 64], [1, 48], [5, 8192], [9, 16392]):
        inputs = make_inputs(shape, dtype, x2=x2, dsum=dsum)
        everything = library.run(inputs)
        assert_matches(inputs, **everything)
        for count in range(len(OUTPUTS)):
            for outputs in itertools.combinations(OUTPUTS, count):
                assert_same_bits(library.run(inputs, outputs), everything)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_alignment_of_any_tensor(library: EmulatedLibrary, dtype: np.dtype) -> None:
    for cols in (64, 1024):
        inputs = make_inputs([9, cols], dtype)
        for name in [*inputs.arrays(), *OUTPUTS]:
            item_bytes = 4 if name in ("rstd", "mean", "dgamma", "dbeta") else dtype.itemsize
            for offset in (item_bytes, 8):
                assert_matches(inputs, **library.run(inputs, offsets={name: offset}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["dy", "x1", "x2", "dsum"])
def test_dx_may_take_over_an_inputs_buffer(library: EmulatedLibrary, dtype: np.dtype, name: str) -> None:
    for shape in ([77, 64], [23, 1024], [7, 8192], [9, 16392], [40, 100], [41, 33]):
        inputs = make_inputs(shape, dtype)
        expected = library.run(inputs)
        for copies_at_wait in (True, False):
            library.use(SMALL, order=RANDOM, copies_at_wait=copies_at_wait)
            assert_same_bits(library.run(inputs, in_place=name), expected)
        library.use(SMALL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_are_split_over_the_device(library: EmulatedLibrary, dtype: np.dtype) -> None:
    library.use(HOPPER)
    for shape in ([1, 4096], [2, 8192], [16, 4096], [1, 200003], [3, 65536]):
        assert library.plan(*shape, dtype)["splits"] > 1
        inputs = make_inputs(shape, dtype)
        assert_matches(inputs, **library.run(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(library: EmulatedLibrary, dtype: np.dtype) -> None:
    for device in (SMALL, ADA):
        library.use(device)
        for shape in ([5000, 8], [3000, 5], [2000, 64]):
            for dy_mean in (0.0, 1.0):
                inputs = make_inputs(shape, dtype)
                inputs = inputs.replace(dy=(inputs.dy.astype(np.float32) + dy_mean).astype(dtype))
                assert_matches(inputs, **library.run(inputs))


@pytest.mark.parametrize("shape", [[5], [2, 3, 5], [2, 3, 4, 8], [1, 1, 1, 1, 2, 1, 3, 4]], ids=str)
def test_every_rank_and_number_of_normalised_axes(library: EmulatedLibrary, shape: list[int]) -> None:
    for axes in range(1, len(shape) + 1):
        for trailing_ones in (True, False):
            inputs = make_inputs(shape, axes=axes, trailing_ones=trailing_ones)
            assert_matches(inputs, **library.run(inputs))


def test_no_rows(library: EmulatedLibrary) -> None:
    library.take_launches()
    for shape in ([0, 8], [3, 0, 7], [0, 0, 100]):
        inputs = make_inputs(shape)
        results = library.run(inputs)
        assert results["dx"].shape == tuple(shape)
        np.testing.assert_array_equal(results["dgamma"], np.zeros(shape[-1], np.float32))
        np.testing.assert_array_equal(results["dbeta"], np.zeros(shape[-1], np.float32))
    assert library.take_launches() == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [7, 48, 2048, 16392])
def test_non_finite_values(library: EmulatedLibrary, dtype: np.dtype, cols: int) -> None:
    rng = np.random.default_rng(0)
    plain = make_inputs([6, cols], dtype)
    other = library.run(plain)["dx"]
    for name in ("dy", "x1", "x2", "dsum", "mean", "rstd", "gamma"):
        for value in (np.nan, np.inf, -np.inf):
            array = plain.arrays()[name].copy()
            array.reshape(-1)[rng.integers(array.size)] = value
            changed = plain.replace(**{name: array})
            results = library.run(changed)
            assert_matches(changed, **results)
            if name != "gamma":
                rows = (array != plain.arrays()[name]).reshape(6, -1).any(axis=1)
                assert results["dx"][~rows].tobytes() == other[~rows].tobytes()


def test_the_result_does_not_depend_on_what_the_workspace_held(library: EmulatedLibrary) -> None:
    for shape in ([1, 4], [77, 64], [30, 1024], [5, 16392], [40, 33]):
        inputs = make_inputs(shape)
        clean = library.run(inputs, workspace_fill=0)
        assert_same_bits(library.run(inputs, workspace_fill=0xFF), clean)
        assert_same_bits(library.run(inputs, workspace_fill=0x7F, repeats=3), clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_column_has_no_gradient_but_dsum(library: EmulatedLibrary, dtype: np.dtype) -> None:
    inputs = make_inputs([100, 1], dtype)
    x = (inputs.x1 + inputs.x2).astype(np.float32)
    inputs = inputs.replace(mean=x, rstd=np.full([100, 1], 316.0, np.float32))
    np.testing.assert_array_equal(library.run(inputs)["dx"], inputs.dsum)


def test_offsets_of_more_than_32_bits(library: EmulatedLibrary) -> None:
    """The last rows of tensors with more than 2^32 elements, of which only those rows are ever touched."""
    for cols, dtype in ((8192, BFLOAT16), (16392, FLOAT16), (8191, FLOAT)):
        # So many multiprocessors that every block has one row, or one part of the rows; the last few are run.
        library.use(Device(1 << 20, 228 << 10, 227 << 10))
        rows = (1 << 32) // cols + 3
        plan = library.plan(rows, cols, dtype, aligned=cols % 8 == 0)
        tail = make_inputs([plan["rows_per_part"] or 1, cols], dtype)
        sizes = {name: rows * cols * dtype.itemsize for name in ("dy", "x1", "x2", "dsum", "dx")}
        sizes |= {
            "rstd": rows * 4,
            "mean": rows * 4,
            "gamma": tail.gamma.nbytes,
            "workspace": plan["workspace_bytes"],
        }
        with SparseMemory(sizes) as memory:
            for name, array in tail.arrays().items():
                memory.write_end(name, array)
            run_last_blocks(library, memory, plan["workspace_bytes"], rows, cols, dtype)
            count = min(len(tail.dy), rows - (plan["parts"] - 1) * max(1, plan["rows_per_part"]))
            last = {name: array[-count:] for name, array in tail.arrays().items() if name != "gamma"}
            dx = memory.read_end("dx", count * cols * dtype.itemsize).view(dtype).reshape(count, cols)
            assert_matches(tail.replace(**last), dx=dx)


def run_last_blocks(
    library: EmulatedLibrary,
    memory: SparseMemory,
    workspace_bytes: int,
    rows: int,
    cols: int,
    dtype: np.dtype,
) -> None:
    shapes = {name: (rows, cols) for name in ("dy", "x1", "x2", "dsum", "dx")}
    shapes |= {"rstd": (rows, 1), "mean": (rows, 1), "gamma": (cols,)}
    tensors: dict[str, Tensor] = {
        name: tensor(shape, DATA_TYPES[FLOAT if name in ("rstd", "mean") else dtype], memory.addresses[name])
        for name, shape in shapes.items()
    }
    planned_bytes, executor = library._planned(tensors)
    assert planned_bytes == workspace_bytes
    try:
        with library.only_last_blocks(64):
            library._check(library._compute(memory.addresses["workspace"], workspace_bytes, executor, None))
    finally:
        library._destroy(executor)


def test_errors_are_those_of_the_cpu(library: EmulatedLibrary) -> None:
    good = {
        **{name: tensor([4, 8], 1) for name in ("dy", "x1", "x2", "dsum", "dx")},
        **{name: tensor([4, 1], 1) for name in ("rstd", "mean")},
        **{name: tensor([8], 1) for name in ("gamma", "dgamma", "dbeta")},
    }
    assert library.workspace_bytes(**good) >= 0
    with pytest.raises(
        KernelError, match=r"gamma must be \[8\], the last axis of dy \[4,8\]; got \[7\]"
    ) as error:
        library.workspace_bytes(**{**good, "gamma": tensor([7], 1)})
    assert error.value.status == INVALID_PARAMETER
    with pytest.raises(KernelError, match="x1 is required; got a null pointer") as error:
        library.workspace_bytes(**{name: value for name, value in good.items() if name != "x1"})
    assert error.value.status == NULL_POINTER
    with pytest.raises(KernelError, match=r"workspace must have \d+ bytes; got \d+") as error:
        library.run(make_inputs([300, 64]), workspace_missing_bytes=1)
    assert error.value.status == WORKSPACE_TOO_SMALL


def test_the_operators_own_functions_give_the_same(library: EmulatedLibrary) -> None:
    inputs = make_inputs([300, 64])
    expected = library.run(inputs)
    c_interface = library._library
    outputs = {name: np.full_like(array, np.nan) for name, array in expected.items()}
    tensors = [
        tensor(array.shape, DATA_TYPES[array.dtype], array.ctypes.data)
        for array in (*inputs.arrays().values(), *outputs.values())
    ]
    workspace_bytes, executor = ctypes.c_size_t(), ctypes.c_void_p()
    library._check(
        c_interface.ort_ops_add_layer_norm_grad_cuda_get_workspace_size(
            *map(ctypes.byref, tensors), ctypes.byref(workspace_bytes), ctypes.byref(executor)
        )
    )
    with SparseMemory({"workspace": workspace_bytes.value}) as memory:
        workspace = ctypes.c_void_p(memory.addresses["workspace"])
        library._check(
            c_interface.ort_ops_add_layer_norm_grad_cuda(workspace, workspace_bytes, executor, None)
        )
    c_interface.ort_ops_add_layer_norm_grad_cuda_destroy(executor)
    assert_same_bits(outputs, expected)


def test_phase_two_refuses_what_was_not_planned_for_cuda(library: EmulatedLibrary) -> None:
    tensors = [ctypes.byref(tensor([4], 1))] * 3
    workspace_bytes, executor = ctypes.c_size_t(), ctypes.c_void_p()
    plan = library._library.ort_ops_relu_grad_get_workspace_size
    library._check(plan(*tensors, ctypes.byref(workspace_bytes), ctypes.byref(executor)))
    with pytest.raises(KernelError, match="executor must be planned by ort_ops_plan_on_cuda first"):
        library._check(library._compute(None, 0, executor, None))
    library._destroy(executor)
    with pytest.raises(KernelError, match="executor is required; got a null pointer"):
        library._check(library._compute(None, 0, None, None))
