"""The C interface: what phase one refuses and how, the size of the workspace, and the choice of the
instruction set."""

from __future__ import annotations

import ctypes

import pytest
from native import (
    INVALID_PARAMETER,
    NULL_POINTER,
    PARALLEL_FOR_FAILED,
    WORKSPACE_TOO_SMALL,
    KernelError,
    Library,
    Tensor,
    Threads,
    tensor,
)
from oracle import make_inputs

FLOAT, FLOAT16, DOUBLE, BFLOAT16 = 1, 10, 11, 16


def tensors(shape=(8, 128, 768), data_type=FLOAT, norm_rank=1) -> dict[str, Tensor]:
    lead, norm = shape[: len(shape) - norm_rank], shape[len(shape) - norm_rank :]
    like_dy = {name: tensor(shape, data_type) for name in ("dy", "x1", "x2", "dsum", "dx")}
    statistics = {name: tensor((*lead, *([1] * norm_rank)), FLOAT) for name in ("rstd", "mean")}
    parameters = {name: tensor(norm, FLOAT) for name in ("dgamma", "dbeta")}
    return {**like_dy, **statistics, **parameters, "gamma": tensor(norm, data_type)}


REFUSED = [
    ("gamma", tensor([512], FLOAT), "gamma must be [768], the last axis of dy [8,128,768]; got [512]"),
    (
        "gamma",
        tensor([64, 768], FLOAT),
        "gamma must be [128,768], the last 2 axes of dy [8,128,768]; got [64,768]",
    ),
    (
        "gamma",
        tensor([1, 8, 128, 768], FLOAT),
        "gamma must be [8,128,768], the last 3 axes of dy [8,128,768]; got [1,8,128,768]",
    ),
    ("gamma", tensor([], FLOAT), "gamma must have rank 1 to 8; got rank 0"),
    ("gamma", tensor([768], FLOAT16), "gamma must be float, the type of dy, or float; got float16"),
    ("x1", tensor([8, 128, 767], FLOAT), "x1 must have the shape of dy, [8,128,768]; got [8,128,767]"),
    ("x2", tensor([128, 768], FLOAT), "x2 must have the shape of dy, [8,128,768]; got [128,768]"),
    ("dsum", tensor([8, 128, 1], FLOAT), "dsum must have the shape of dy, [8,128,768]; got [8,128,1]"),
    ("x1", tensor([8, 128, 768], FLOAT16), "x1 must be float, the type of dy; got float16"),
    (
        "rstd",
        tensor([8, 127, 1], FLOAT),
        "rstd must be [8,128,1], one value for each row of dy [8,128,768], "
        "or the same without the trailing ones; got [8,127,1]",
    ),
    (
        "mean",
        tensor([8, 128, 768], FLOAT),
        "mean must be [8,128,1], one value for each row of dy [8,128,768], "
        "or the same without the trailing ones; got [8,128,768]",
    ),
    ("mean", tensor([8, 128, 1], FLOAT16), "mean must be float; got float16"),
    ("dy", tensor([8, 128, 768], DOUBLE), "dy must be float, float16 or bfloat16; got ONNX data type 11"),
    ("dy", tensor([], FLOAT), "dy must have rank 1 to 8; got rank 0"),
    ("dy", tensor([1] * 9, FLOAT), "dy must have rank 1 to 8; got rank 9"),
    ("dy", tensor([8, -1, 768], FLOAT), "dy must have no negative dim; got [8,-1,768]"),
    ("dgamma", tensor([512], FLOAT), "dgamma must have the shape of gamma, [768]; got [512]"),
    ("dbeta", tensor([768], FLOAT16), "dbeta must be float; got float16"),
    ("dx", tensor([8, 128, 767], FLOAT), "dx must have the shape of dy, [8,128,768]; got [8,128,767]"),
]


@pytest.mark.parametrize(("name", "wrong", "sentence"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_what_is_refused(installed: Library, name: str, wrong: Tensor, sentence: str) -> None:
    with pytest.raises(KernelError) as caught:
        installed.workspace_bytes(**{**tensors(), name: wrong})
    assert (caught.value.status, str(caught.value)) == (INVALID_PARAMETER, sentence)


def test_no_columns_are_refused(installed: Library) -> None:
    with pytest.raises(KernelError, match=r"gamma must have at least one element; got \[0\]") as caught:
        installed.workspace_bytes(**tensors((4, 0)))
    assert caught.value.status == INVALID_PARAMETER


def test_sizes_that_overflow_are_refused(installed: Library) -> None:
    shape = (1 << 31, 1 << 31, 4)
    with pytest.raises(
        KernelError, match=r"dy must have at most 2\^59 elements; got \[2147483648,2147483648,4\]"
    ):
        installed.workspace_bytes(**tensors(shape))
    # An empty tensor is empty however large its other dims are.
    assert installed.workspace_bytes(**tensors((1 << 31, 1 << 31, 0, 4))) == 0


@pytest.mark.parametrize("name", ["dy", "x1", "rstd", "mean", "gamma"])
def test_a_required_tensor_is_missed(installed: Library, name: str) -> None:
    given = {key: value for key, value in tensors().items() if key != name}
    with pytest.raises(KernelError, match=f"{name} is required; got a null pointer") as caught:
        installed.workspace_bytes(**given)
    assert caught.value.status == NULL_POINTER


@pytest.mark.parametrize("name", list(tensors()))
def test_a_tensor_without_data_is_refused(installed: Library, name: str) -> None:
    given = tensors()
    given[name].data = None
    with pytest.raises(KernelError, match=f"{name} has elements, but its data is a null pointer") as caught:
        installed.workspace_bytes(**given)
    assert caught.value.status == NULL_POINTER


def test_phase_two_refuses_a_small_workspace(installed: Library) -> None:
    with pytest.raises(KernelError, match=r"workspace must have (\d+) bytes; got (\d+)") as caught:
        installed.run(make_inputs([4000, 64]), workspace_missing_bytes=1)
    assert caught.value.status == WORKSPACE_TOO_SMALL


def test_a_parallel_for_that_fails_is_reported(installed: Library) -> None:
    class Broken(Threads):
        def _run(self, *_arguments) -> int:
            return 7

    with pytest.raises(KernelError, match="the caller's parallel-for did not run its") as caught:
        installed.run(make_inputs([4000, 64]), threads=Broken(2))
    assert caught.value.status == PARALLEL_FOR_FAILED


@pytest.mark.parametrize("data_type", [FLOAT, BFLOAT16])
def test_the_workspace_is_small_and_depends_on_the_shape_alone(installed: Library, data_type: int) -> None:
    element_bytes = 4 if data_type == FLOAT else 2
    for rows in (0, 1, 2, 7, 63, 64, 65, 1000, 65536, 1 << 20, (1 << 31) + 1):
        for cols in (1, 2, 63, 64, 65, 768, 4096, 16384, 200003, 1 << 20, 1 << 26):
            if rows * cols > 1 << 59:
                continue
            size = installed.workspace_bytes(**tensors((rows, cols), data_type=data_type))
            assert size <= max(4 << 20, 0.02 * rows * cols * element_bytes), (rows, cols)
            blocks = max(64, -(-rows // 64))
            assert size <= blocks * 8 * (cols + 63), (rows, cols)
            alone = {
                k: v for k, v in tensors((rows, cols), data_type=data_type).items() if k not in ("x2", "dsum")
            }
            assert installed.workspace_bytes(**alone) == size


def test_a_last_error_belongs_to_its_thread(installed: Library) -> None:
    import threading

    seen = {}

    def fail(name: str, cols: int) -> None:
        for _ in range(200):
            with pytest.raises(KernelError) as caught:
                installed.workspace_bytes(**{**tensors(), "gamma": tensor([cols], FLOAT)})
            seen.setdefault(name, set()).add(str(caught.value))

    threads = [threading.Thread(target=fail, args=(str(cols), cols)) for cols in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: [text[-3:] for text in texts] for name, texts in seen.items()} == {
        str(cols): [f"[{cols}]"] for cols in (1, 2, 3, 4)
    }


def test_an_unknown_instruction_set_is_refused(installed: Library) -> None:
    with pytest.raises(
        KernelError, match=f"the CPU target must be one of {','.join(installed.targets)}; got MMX"
    ):
        installed.use_target("MMX")
    assert installed.target == installed.targets[0]


def test_the_library_says_its_version(installed: Library) -> None:
    import ort_ops

    library = installed._library
    assert library.ort_ops_version().decode() in (ort_ops.__version__, "0.0.0")


def test_a_null_executor_is_refused(installed: Library) -> None:
    compute = installed._library.ort_ops_run_on_cpu
    assert compute(None, 0, None, None) == NULL_POINTER
    assert installed._library.ort_ops_last_error() == b"executor is required; got a null pointer"
    installed._library.ort_ops_destroy_executor(ctypes.c_void_p(None))


def test_the_workspace_of_an_enormous_tensor_does_not_overflow(installed: Library) -> None:
    size = installed.workspace_bytes(**tensors(((1 << 50) + 1, 64)))
    assert 0 < size <= 0.02 * ((1 << 50) + 1) * 64 * 4
    assert size % 64 == 0
