"""One session, many shapes and threads: every result is that of a fresh session, bit for bit, each time."""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from operator_models import make_model, run_session
from oracle import BFLOAT16, FLOAT, FLOAT16, assert_matches, make_inputs
from plugin_sessions import memory_bytes, plugin_session, run_kernel, run_script


def digest(results: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(results[name].tobytes() for name in sorted(results))).hexdigest()


SHAPES = [(8192, 256), (1024, 2048), (20011, 33), (3, 70001), (257, 513), (5, 3)]


@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_for_every_number_of_threads_and_every_repeat(dtype, shape):
    inputs = make_inputs(shape, dtype)
    expected = digest(run_kernel(inputs, threads=1))
    for threads in (1, 2, 3, 4):
        session = plugin_session(make_model(inputs), threads=threads)
        for _ in range(10):
            assert digest(run_session(session, inputs.arrays())) == expected, f"{threads} threads"


def test_same_bits_in_another_process():
    script = """
from oracle import BFLOAT16, make_inputs
from plugin_sessions import run_kernel
from test_stateless import digest
print(digest(run_kernel(make_inputs((1000, 768), BFLOAT16), threads=2)))
"""
    outputs = {run_script(f"import sys; sys.path.insert(0, {FOLDER!r})" + script).stdout for _ in range(2)}
    assert outputs == {digest(run_kernel(make_inputs((1000, 768), BFLOAT16), threads=1)) + "\n"}


FOLDER = __file__.rpartition("/")[0]


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT16], ids=str)
def test_one_session_runs_changing_shapes(dtype):
    session = plugin_session(make_model(make_inputs((1, 128), dtype), symbolic=True), threads=2)
    for run, rows in enumerate((4096, 1, 777, 0, 4096, 2, 4095)):
        for cols in (128, 1, 131):
            inputs = make_inputs((rows, cols), dtype, seed=run)
            results = run_session(session, inputs.arrays())
            assert_matches(inputs, **results)
            assert digest(results) == digest(run_kernel(inputs))


def test_threads_share_a_session_each_with_shapes_of_its_own():
    session = plugin_session(make_model(make_inputs((1, 128)), symbolic=True), threads=2)

    def work(index: int) -> None:
        cases = [make_inputs((1 + 97 * index + 13 * k, 64 + index), seed=index + 8 * k) for k in range(4)]
        expected = [digest(run_kernel(inputs)) for inputs in cases]
        for repeat in range(25):
            inputs = cases[repeat % 4]
            assert digest(run_session(session, inputs.arrays())) == expected[repeat % 4]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_changed_values_of_one_shape_are_read_anew():
    session = plugin_session(make_model(make_inputs((64, 96))))
    for seed in range(5):
        inputs = make_inputs((64, 96), seed=seed)
        assert_matches(inputs, **run_session(session, inputs.arrays()))


@pytest.mark.skipif(sys.platform != "linux", reason="memory use is read from Linux's /proc")
def test_memory_does_not_grow_from_run_to_run():
    session = plugin_session(make_model(make_inputs((1, 1024)), symbolic=True), threads=2)
    cases = [make_inputs((rows, 1024)) for rows in (512, 300, 1, 511)]

    def run_all(times: int) -> None:
        for _ in range(times):
            for inputs in cases:
                run_session(session, inputs.arrays())

    run_all(10)
    before = memory_bytes("VmRSS")
    run_all(100)
    # A dx that was kept for each of the 400 runs would be 500 MiB.
    assert memory_bytes("VmRSS") - before < 64 << 20
