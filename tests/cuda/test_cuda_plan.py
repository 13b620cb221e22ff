"""The planned launches, without launching any: within each device's limits, covering all elements."""

from __future__ import annotations

import itertools

import pytest
from emulated import AMPERE, DEVICES, HOPPER, TURING, EmulatedLibrary
from oracle import BFLOAT16, DTYPES, FLOAT

NO_ROWS, ROWS_IN_SHARED, TWO_READS = range(3)

# cols_per_thread: (threads of a block, threads of a multiprocessor), as the kernels are compiled.
LIMITS = {8: (256, 1024), 16: (256, 768), 32: (512, 512)}

ROWS = [1, 2, 3, 7, 16, 17, 100, 131, 132, 1000, 4096, 65536, 1_000_003, 1 << 32]
COLS = [
    *range(1, 40),
    *(64, 96, 100, 128, 256, 384, 512, 640, 768, 1000, 1024, 1280, 1536, 2048, 2056, 3072, 4096, 4104, 5120),
    *(8192, 8200, 12288, 16384, 16392, 32768, 65536, 200003, 1 << 20, 1 << 35),
]


def cases() -> list[tuple]:
    return [
        case for case in itertools.product(ROWS, COLS, DTYPES, [True, False]) if case[0] * case[1] <= 1 << 40
    ]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_launch_is_within_the_devices_limits(library: EmulatedLibrary, device) -> None:
    library.use(device)
    for rows, cols, dtype, aligned in cases():
        plan = library.plan(rows, cols, dtype, aligned=aligned)
        assert plan["sums_in_outputs"] == (plan["parts"] == 1)
        partial_bytes = 0 if plan["sums_in_outputs"] else plan["parts"] * 2 * cols * 4
        if plan["path"] == ROWS_IN_SHARED:
            max_threads, resident_threads = LIMITS[plan["cols_per_thread"]]
            threads = plan["threads_per_row"] * plan["rows_per_block"]
            assert threads % 32 == 0 and 32 <= threads <= max_threads
            group = plan["threads_per_row"]
            assert group % 32 == 0 or (group < 32 and group & (group - 1) == 0)
            assert plan["threads_per_row"] * plan["cols_per_thread"] >= cols
            block_cols = threads * plan["cols_per_thread"]
            staged = plan["stages"] * plan["staged_tensors"] * block_cols * dtype.itemsize
            assert plan["shared_bytes"] == 2 * threads // 32 * 8 + block_cols * 4 + staged
            assert plan["shared_bytes"] <= device.shared_bytes_per_block
            # A block's sums over rows pass through its staging memory in the end.
            assert plan["rows_per_block"] * cols * 4 <= staged + block_cols * 4
            assert 1 <= plan["stages"] <= 3 and 2 <= plan["staged_tensors"] <= 4
            blocks = -(-plan["blocks"] // device.multiprocessors)
            assert blocks * threads <= resident_threads
            assert blocks * (plan["shared_bytes"] + 1024) <= device.shared_bytes_per_multiprocessor
            assert plan["parts"] == plan["blocks"] < 1 << 31
            assert (plan["blocks"] - 1) * plan["rows_per_block"] < rows
            assert plan["workspace_bytes"] == partial_bytes
        else:
            assert plan["path"] == TWO_READS
            assert plan["sums_per_block"] * plan["threads_per_sum"] == 256
            assert plan["cols_per_split"] % plan["elements_per_access"] == 0
            assert (
                (plan["splits"] - 1) * plan["cols_per_split"]
                < cols
                <= plan["splits"] * plan["cols_per_split"]
            )
            assert plan["sum_blocks"] < 1 << 31 and plan["tiles"] < 1 << 31 and plan["parts"] <= 65535
            tile_cols = plan["tile_threads"] * plan["elements_per_access"]
            assert (plan["tiles"] - 1) * tile_cols < cols <= plan["tiles"] * tile_cols
            assert plan["tile_threads"] % 32 == 0 and plan["tile_threads"] <= 256
            assert (plan["parts"] - 1) * plan["rows_per_part"] < rows <= plan["parts"] * plan["rows_per_part"]
            assert plan["parts"] <= 32 * device.multiprocessors
            assert plan["row_sums_offset"] % 16 == 0 and plan["row_sums_offset"] >= partial_bytes
            assert plan["workspace_bytes"] == plan["row_sums_offset"] + rows * plan["splits"] * 8
            # As the header says.
            row_sums_limit = 8 * rows + 32 * device.multiprocessors
            assert rows * plan["splits"] * 8 <= row_sums_limit


def test_which_path_a_shape_takes(library: EmulatedLibrary) -> None:
    library.use(HOPPER)
    for cols in (8, 64, 96, 256, 512, 768, 1024, 2048, 4096, 5120, 8192, 16384):
        for dtype in DTYPES:
            assert library.plan(8192, cols, dtype)["path"] == ROWS_IN_SHARED, (cols, dtype)
            assert library.plan(8192, cols, dtype, aligned=False)["path"] == TWO_READS
    for dtype in DTYPES:
        assert library.plan(8192, 16392, dtype)["path"] == TWO_READS
        assert library.plan(8192, 769, dtype)["path"] == TWO_READS
        # Few long rows are split over the multiprocessors, short ones are not worth it.
        assert library.plan(4, 8192, dtype)["splits"] > 1
        assert library.plan(4, 1024, dtype)["path"] == ROWS_IN_SHARED
        assert library.plan(0, 64, dtype) == dict.fromkeys(library.plan(0, 64, dtype), 0)


def test_every_launch_of_the_wide_rows_uses_the_shared_memory_it_can_get(library: EmulatedLibrary) -> None:
    # (device, dtype, cols): (blocks of a multiprocessor, stages, staged tensors)
    expected = {
        (HOPPER, BFLOAT16, 1024): (8, 2, 4),
        (HOPPER, BFLOAT16, 4096): (3, 1, 4),
        (HOPPER, BFLOAT16, 8192): (2, 1, 4),
        (HOPPER, BFLOAT16, 16384): (1, 1, 4),
        (HOPPER, FLOAT, 4096): (3, 1, 3),
        (HOPPER, FLOAT, 8192): (2, 1, 2),
        (HOPPER, FLOAT, 16384): (1, 1, 2),
        (AMPERE, BFLOAT16, 16384): (1, 1, 3),
        (TURING, BFLOAT16, 4096): (1, 1, 4),
    }
    for (device, dtype, cols), (blocks, stages, staged_tensors) in expected.items():
        library.use(device)
        plan = library.plan(1 << 20, cols, dtype)
        found = plan["blocks"] // device.multiprocessors, plan["stages"], plan["staged_tensors"]
        assert found == (blocks, stages, staged_tensors), (device, dtype, cols)


def test_more_columns_than_a_grid_can_count_are_refused(library: EmulatedLibrary) -> None:
    assert library.plan(1, (1 << 35) + 8, FLOAT) == {}
