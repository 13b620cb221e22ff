"""The installed library's CUDA part where there is no device: it says so, and disturbs no CPU session."""

from __future__ import annotations

import ctypes
from collections import Counter

import numpy as np
import onnxruntime
import pytest
from native import KernelError, Library, tensor
from operator_models import make_model, run_session
from oracle import assert_matches, make_inputs

import ort_ops
from ort_ops.library import cuda_operators, describe, load_library
from ort_ops.operators import OPERATORS

CUDA_FAILED = 1004
CUDA_NOT_BUILT = 1005


def architectures() -> str:
    library = load_library()
    library.ort_ops_cuda_architectures.restype = ctypes.c_char_p
    return library.ort_ops_cuda_architectures().decode()


def has_device() -> bool:
    return load_library().ort_ops_cuda_device(ctypes.create_string_buffer(256), ctypes.c_size_t(256)) == 0


class CudaLibrary(Library):
    """Phase one on CUDA."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._plan = self._library.ort_ops_add_layer_norm_grad_cuda_get_workspace_size
        self._plan.argtypes = [ctypes.POINTER(type(tensor([1], 1)))] * 10 + [ctypes.c_void_p] * 2


@pytest.mark.skipif(has_device(), reason="this machine has a CUDA device")
def test_phase_one_says_why_there_is_no_device() -> None:
    matrix, column, row = tensor([4, 8], 1), tensor([4, 1], 1), tensor([8], 1)
    with pytest.raises(KernelError) as error:
        CudaLibrary(ort_ops.library_path()).workspace_bytes(
            dy=matrix, x1=matrix, rstd=column, mean=column, gamma=row, dx=matrix
        )
    if architectures():
        assert error.value.status == CUDA_FAILED
        assert "finding the current CUDA device failed" in str(error.value)
    else:
        assert error.value.status == CUDA_NOT_BUILT
        assert "built without CUDA" in str(error.value)


@pytest.mark.skipif(not architectures(), reason="the library was built without CUDA")
def test_wrong_arguments_are_told_before_the_device_is_looked_for() -> None:
    matrix, column, row = tensor([4, 8], 1), tensor([4, 1], 1), tensor([7], 1)
    with pytest.raises(KernelError, match=r"gamma must be \[8\], the last axis of dy \[4,8\]; got \[7\]"):
        CudaLibrary(ort_ops.library_path()).workspace_bytes(
            dy=matrix, x1=matrix, rstd=column, mean=column, gamma=row
        )


def test_what_was_built_is_told() -> None:
    facts = describe()
    if architectures():
        names = architectures().split(",")
        assert facts["CUDA architectures"] == ",".join(names)
        assert all(name.startswith("sm_") for name in names[:-1]) and names[-1].startswith("compute_")
        assert facts["operators on CUDA"] == ", ".join(sorted(cuda_operators()))
        assert has_device() or "none can be used" in facts["CUDA device"]
    else:
        assert facts["operators on CUDA"] == "none, built without"
        assert cuda_operators() == set()


class CustomOp(ctypes.Structure):
    """The beginning of the runtime's OrtCustomOp."""

    _fields_ = [
        ("version", ctypes.c_uint32),
        ("create_kernel", ctypes.c_void_p),
        ("name", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)),
        ("provider", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)),
    ]


def registered_kernels() -> Counter[tuple[str, str]]:
    """How many kernels there are for each operator and provider."""
    library = load_library()
    ort_ops.register(onnxruntime.SessionOptions())  # before, the library hands out no operators
    kernels: Counter[tuple[str, str]] = Counter()
    while (address := library.ort_ops_custom_op(kernels.total())) is not None:
        op = CustomOp.from_address(address)
        kernels[op.name(address).decode(), op.provider(address).decode()] += 1
    return kernels


def test_on_cuda_there_are_kernels_for_the_same_types_as_on_the_cpu() -> None:
    kernels = registered_kernels()
    on_cuda = {name for name, provider in kernels if provider == "CUDAExecutionProvider"}
    assert on_cuda == cuda_operators() and bool(on_cuda) == bool(architectures())
    for name in on_cuda:
        assert kernels[name, "CUDAExecutionProvider"] == kernels[name, "CPUExecutionProvider"], name


def test_every_operator_has_a_kernel_on_the_cpu() -> None:
    names = {name for name, provider in registered_kernels() if provider == "CPUExecutionProvider"}
    assert names == {operator.name for operator in OPERATORS}


def test_a_cpu_session_runs_the_cpu_kernel_beside_the_cuda_kernels() -> None:
    inputs = make_inputs([9, 64])
    options = onnxruntime.SessionOptions()
    ort_ops.register(options)
    # CUDA may be asked for where it is not: the runtime then warns, and takes the CPU.
    for providers in (["CPUExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]):
        available = [name for name in providers if name in onnxruntime.get_available_providers()]
        session = onnxruntime.InferenceSession(make_model(inputs).SerializeToString(), options, available)
        results = run_session(session, inputs.arrays())
        assert_matches(inputs, **{name: np.asarray(array) for name, array in results.items()})
