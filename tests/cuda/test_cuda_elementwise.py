"""The CUDA kernels of the operators that work element by element, emulated (emulated.py).

Against the references of the CPU's kernels, by tests of theirs, which run here as they are, and by tests for
what is CUDA's own: vectors wherever the tensors begin, and the same bits on every grid.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from emulated import RANDOM, SMALL, TURING, Device, EmulatedLibrary
from native import DATA_TYPES, tensor
from oracle import BFLOAT16, DTYPES, FLOAT
from sparse_memory import SparseMemory
from test_adamw import (  # noqa: F401
    RESULTS,
    make_inputs,
    run,
    test_an_update_that_is_skipped_keeps_every_bit,
    test_every_length,
    test_non_finite_values_stay_where_they_are,
)
from test_gelu_grad import (  # noqa: F401
    FORMS,
    assert_right,
    gelu_grad,
    test_every_length_and_alignment,
    test_every_x,
    test_non_finite_values,
)
from test_relu_grad import relu_grad, test_every_bit_pattern  # noqa: F401


def test_every_kernel_is_run_and_no_other(library: EmulatedLibrary) -> None:
    library.take_launches()
    for dtype in DTYPES:
        ones = np.ones(9, dtype)
        gelu_grad(library, ones, ones, "none")
        relu_grad(library, ones, ones)
    run(library, make_inputs((9,)))
    assert set(library.take_launches()) == {
        *(f"GeluGrad<{name}>" for name in ("float", "__half", "__nv_bfloat16")),
        *("ReluGrad<int, 2139095040>", "ReluGrad<short, (short)31744>", "ReluGrad<short, (short)32640>"),
        "AdamW",
    }


def test_nothing_is_launched_for_nothing(library: EmulatedLibrary) -> None:
    library.take_launches()
    assert gelu_grad(library, np.ones((3, 0), FLOAT), np.ones((3, 0), FLOAT), "tanh").shape == (3, 0)
    assert library.take_launches() == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_may_begin_anywhere_together_or_apart(library: EmulatedLibrary, dtype: np.dtype) -> None:
    """Where they are misaligned alike, single elements lead up to the first vector."""
    rng = np.random.default_rng(0)
    for count in (1, 7, 8, 9, 40, 1003):
        dy, x = rng.standard_normal((2, count)).astype(dtype)
        clean = gelu_grad(library, dy, x, "none")
        clean_relu = relu_grad(library, dy, x)
        for shift, other in itertools.product((0, 1, 3, 7), (0, 1)):
            offsets = {"dy": shift * dtype.itemsize, "x": shift * dtype.itemsize}
            offsets |= {"y": offsets["x"], "dx": (shift + other) * dtype.itemsize}
            moved = gelu_grad(library, dy, x, "none", offsets=offsets)
            assert moved.tobytes() == clean.tobytes()
            assert relu_grad(library, dy, x, offsets=offsets).tobytes() == clean_relu.tobytes()


def test_neither_the_grid_nor_the_order_of_threads_nor_shared_buffers_change_a_bit(
    library: EmulatedLibrary,
) -> None:
    rng = np.random.default_rng(1)
    dy, x = rng.standard_normal((2, 3, 50001), dtype=np.float32)
    inputs = make_inputs((3, 50001))
    in_place = {f"{name}_updated": name for name in ("parameter", "first_moment", "second_moment")}
    clean = gelu_grad(library, dy, x, "tanh"), relu_grad(library, dy, x), run(library, inputs)
    for device, order in ((Device(1, 65536, 65536), RANDOM), (TURING, RANDOM), (SMALL, RANDOM)):
        library.use(device, order=order)
        for source in ("dy", "x"):
            again = gelu_grad(library, dy, x, "tanh", in_place={"dx": source})
            assert again.tobytes() == clean[0].tobytes()
        assert relu_grad(library, dy, x, in_place={"dx": "y"}).tobytes() == clean[1].tobytes()
        shifted = run(library, inputs, offsets={"gradient": 4, "decay": 4, "update": 1})
        for again in (shifted, run(library, inputs, in_place=in_place)):
            assert all(again[name].tobytes() == clean[2][name].tobytes() for name in RESULTS)


def test_offsets_of_more_than_32_bits(library: EmulatedLibrary) -> None:
    """The end of tensors with more than 2^32 elements, by the grid's last block."""
    library.use(Device(1 << 20, 65536, 65536))  # a block for every 256 vectors
    count = (1 << 32) + 12344  # whole vectors
    dy, x = np.random.default_rng(0).standard_normal((2, 1000)).astype(BFLOAT16)
    with SparseMemory(dict.fromkeys(("dy", "x", "dx"), 2 * count)) as memory:
        memory.write_end("dy", dy)
        memory.write_end("x", x)
        tensors = [tensor((count,), DATA_TYPES[BFLOAT16], memory.addresses[name]) for name in memory.sizes]
        _, executor = library._planned_by(library._plan_function("gelu_grad"), tensors, [b"none"])
        try:
            with library.only_last_blocks(1):
                library._check(library._compute(None, 0, executor, None))
        finally:
            library._destroy(executor)
        last = count % 2048  # elements of a block
        dx = memory.read_end("dx", 2 * last).view(BFLOAT16)
    assert_right(dx, dy[-last:], x[-last:], "none")
