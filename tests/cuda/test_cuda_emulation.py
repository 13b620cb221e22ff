"""The emulation itself: right kernels pass in every order of the threads, planted faults are caught."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulated import EMULATION, FORWARD, RANDOM, REVERSE, WARP_AHEAD, compile_emulated

THREADS = 96
EXACT_SHARED_BYTES = THREADS * 4
ORDERS = [(FORWARD, 0), (REVERSE, 0), *((order, seed) for order in (RANDOM, WARP_AHEAD) for seed in range(3))]
VALUES = np.arange(1, THREADS + 1, dtype=np.float32)
LANES = np.arange(THREADS)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    sources = [EMULATION / "emulator.cc", EMULATION / "planted_faults.cc"]
    path: Path = compile_emulated(sources, tmp_path_factory.mktemp("planted") / "libplanted.so")
    library = ctypes.CDLL(str(path))
    library.emulation_run.restype = ctypes.c_char_p
    return library


def run(
    emulator: ctypes.CDLL,
    kernel: str,
    *,
    shared_bytes: int = 2 * EXACT_SHARED_BYTES,
    order: int = FORWARD,
    seed: int = 0,
    copies_at_wait: bool = True,
) -> tuple[np.ndarray, str]:
    """(the result, or what the emulation found wrong)."""
    out = np.zeros(THREADS, np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (VALUES, out)]
    arguments = [ctypes.c_size_t(shared_bytes), order, seed, int(copies_at_wait)]
    return out, emulator.emulation_run(kernel.encode(), *pointers, *arguments).decode()


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("Exchange", VALUES[(LANES + 40) % THREADS]),
        ("Shuffle", VALUES + VALUES[LANES ^ 1] + VALUES[LANES ^ 8] + VALUES[LANES ^ 9]),
        ("Ballot", (LANES % 32 + 2) // 2),
        ("ShuffleOfHalfAWarp", np.where(LANES % 32 < 16, VALUES[LANES ^ 1], 0)),
        ("AsyncCopy", 2 * VALUES),
        ("WarpSums", 3 * np.ones(THREADS) * VALUES[[0, 32, 64]].sum()),
    ],
)
@pytest.mark.parametrize("copies_at_wait", [True, False])
def test_right_kernels_are_right_in_every_order(emulator, kernel, expected, copies_at_wait) -> None:
    for order, seed in ORDERS:
        out, failure = run(emulator, kernel, order=order, seed=seed, copies_at_wait=copies_at_wait)
        assert failure == ""
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    "kernel", ["MissingBarrier", "MissingSecondBarrier", "LastWriterWins", "WarpSumsWithoutASecondBuffer"]
)
def test_a_race_gives_other_results_in_another_order(emulator, kernel) -> None:
    results = {run(emulator, kernel, order=order, seed=seed)[0].tobytes() for order, seed in ORDERS}
    assert len(results) > 1


def test_a_value_read_before_its_barrier_is_a_nan(emulator) -> None:
    assert np.isnan(run(emulator, "MissingBarrier")[0]).any()


@pytest.mark.parametrize("order", [FORWARD, REVERSE, RANDOM, WARP_AHEAD])
@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        ("DivergentBarrier", "(0,0) 64 of 96 threads wait at __syncthreads, 0 at a shuffle, 32 have"),
        ("BarrierAgainstShuffle", "divergent barrier"),
        ("BallotAgainstShuffle", "or to another kind of shuffle"),
        ("ShuffleOutsideItsMask", "whose mask 0x0000ffff leaves it out"),
        ("ShuffleFromALaneOutside", "which the mask 0x0000ffff leaves out"),
        ("ShuffleWithoutALane", "divergent shuffle"),
        ("AsyncCopyForgotten", "ended with copies that nobody waited for"),
        ("MisalignedCopy", "copies 16 bytes"),
    ],
)  # fmt: skip
def test_what_a_gpu_would_not_survive_is_reported(emulator, kernel, found, order) -> None:
    assert found in run(emulator, kernel, order=order)[1]


def test_shared_memory_starts_as_nan(emulator) -> None:
    out, failure = run(emulator, "Uninitialised")
    assert failure == "" and np.isnan(out).all()


def test_a_copy_that_is_not_waited_for_has_not_come(emulator) -> None:
    out, failure = run(emulator, "AsyncCopyTooEarly")
    assert failure == "" and np.isnan(out).all()


def test_a_write_behind_the_shared_memory_is_reported(emulator) -> None:
    assert run(emulator, "StrayWrite", shared_bytes=EXACT_SHARED_BYTES + 4)[1] == ""
    assert f"at byte {EXACT_SHARED_BYTES}" in run(emulator, "StrayWrite", shared_bytes=EXACT_SHARED_BYTES)[1]


def test_much_shared_memory_must_be_asked_for(emulator) -> None:
    assert run(emulator, "Exchange", shared_bytes=48 << 10)[1] == ""
    assert "where 49152 are allowed" in run(emulator, "Exchange", shared_bytes=(48 << 10) + 16)[1]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_16_bit_types_round_to_nearest_even(emulator, dtype) -> None:
    rng = np.random.default_rng(0)
    patterns = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        halfway = (patterns[:-1].astype(np.float64) + patterns[1:]) / 2
        random_values = rng.standard_normal(100000) * np.exp2(rng.integers(-40, 20, 100000))
        values = np.concatenate([patterns, halfway.astype(np.float32), random_values.astype(np.float32)])
        expected = values.astype(dtype).astype(np.float32)
    out = np.empty_like(values)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (values, out)]
    emulator.emulation_round(int(dtype is not np.float16), ctypes.c_size_t(values.size), *pointers)
    np.testing.assert_array_equal(out, expected)
