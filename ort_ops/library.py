"""Finds the shared library of kernels, registers it with ONNX Runtime, and says what is inside.

Registration goes through onnxruntime-extensions: its library keeps a list of operators that others add,
and registers them together with its own, under ``ai.onnx.contrib``, in every session whose options name
it. So one call gives a session both, and a user who registers onnxruntime-extensions by hand gets ours
too.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.metadata
import importlib.resources
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    import onnxruntime

DOMAIN = "ai.onnx.contrib"

_LIBRARY_NAMES = ("libort_ops.so", "libort_ops.dylib", "ort_ops.dll")

_lock = threading.Lock()
_registered: weakref.WeakSet = weakref.WeakSet()


def library_path() -> str:
    """The absolute path of the shared library.

    It can be given to any language binding of ONNX Runtime that loads custom-op libraries; from Python,
    `register` is the better way, because it brings the operators of onnxruntime-extensions along.

    Raises:
        FileNotFoundError: the package was installed without its library.
    """
    for package in _package_directories():
        for name in _LIBRARY_NAMES:
            candidate = package / name
            if candidate.is_file():
                return os.path.abspath(os.fspath(candidate))  # type: ignore[call-overload]
    raise FileNotFoundError(
        f"the shared library of ort_ops ({' or '.join(_LIBRARY_NAMES)}) is not in the package; "
        "install ort-ops with pip, which builds it, instead of copying its Python files"
    )


def _package_directories() -> Iterator[Traversable]:
    """Where the library may be: in the package that was imported, or in the installed one, when Python was
    started in a clone of the repository and so found the sources first."""
    yield importlib.resources.files("ort_ops")
    try:
        installed = importlib.metadata.distribution("ort-ops").locate_file("ort_ops")
    except importlib.metadata.PackageNotFoundError:
        return
    yield Path(os.fspath(installed))  # type: ignore[call-overload]


@functools.cache
def load_library() -> ctypes.CDLL:
    """The shared library with its C interface (``ort_ops/ort_ops.h``) declared for ctypes."""
    library = ctypes.CDLL(library_path())
    for name in ("ort_ops_version", "ort_ops_last_error", "ort_ops_cpu_targets", "ort_ops_cpu_target"):
        getattr(library, name).restype = ctypes.c_char_p
    library.ort_ops_use_cpu_target.argtypes = [ctypes.c_char_p]
    library.ort_ops_custom_op.argtypes = [ctypes.c_size_t]
    library.ort_ops_custom_op.restype = ctypes.c_void_p
    return library


def cuda_operators() -> frozenset[str]:
    """The names of the operators that have kernels for CUDA; none in a library built without CUDA."""
    library = load_library()
    library.ort_ops_cuda_operators.restype = ctypes.c_char_p
    return frozenset(filter(None, library.ort_ops_cuda_operators().decode().split(",")))


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Makes sessions with these options run the operators of ort_ops and of onnxruntime-extensions.

    May be called again for the same options, for many options, from many threads, and for options on
    which the user has registered onnxruntime-extensions before (provided that ort_ops had been used in
    this process by then: earlier, its list of operators lacked ours).

    Raises:
        ImportError: onnxruntime or onnxruntime-extensions is not installed.
        RuntimeError: a Python ``@onnx_op`` has the name of one of our operators, or these options already
            hold another library's ``ai.onnx.contrib`` domain.
    """
    with _lock:
        if session_options in _registered:
            return
        extensions_path = _extensions_library_path()
        _refuse_python_operators_of_the_same_name()
        _add_operators_to_extensions(extensions_path)
        if not _is_known_to(session_options):
            session_options.register_custom_ops_library(extensions_path)
            _refuse_conflicts(session_options)
        _registered.add(session_options)


def _extensions_library_path() -> str:
    # The package is found, not imported: it imports transformers and PyTorch where they are installed, which
    # takes seconds and 240 MB.
    spec = importlib.util.find_spec("onnxruntime_extensions")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = Path(folder) / f"_extensions_pydll{suffix}"
            if path.is_file():
                return str(path)
    raise ImportError(
        "ort_ops registers its operators through onnxruntime-extensions, which is not installed; "
        "run: pip install onnxruntime-extensions"
    )


def _import_onnxruntime():
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "ONNX Runtime is not installed; run: pip install onnxruntime (for the CPU) "
            "or: pip install onnxruntime-gpu (for CUDA)"
        ) from error
    return onnxruntime


def _refuse_python_operators_of_the_same_name() -> None:
    # onnxruntime-extensions would loop for ever: its search for a free name never advances past a name that
    # is taken.
    if "onnxruntime_extensions" not in sys.modules:
        return
    from onnxruntime_extensions import Opdef

    from ort_ops.operators import OPERATORS

    taken = {operator.name for operator in OPERATORS} & {op.op_type for op in Opdef._odlist.values()}
    if taken:
        name = min(taken)
        raise RuntimeError(
            f"a Python operator named {name} was declared with onnxruntime_extensions.onnx_op; ort_ops "
            f"registers {DOMAIN}::{name} itself, so give the Python operator another name and start a new "
            "process"
        )


@functools.cache
def _add_operators_to_extensions(extensions_path: str) -> None:
    onnxruntime = _import_onnxruntime()
    library = load_library()  # before the options below, which unload with them what only they have loaded
    # Hands our library the runtime's function table, which shape inference needs before any kernel is
    # created.
    onnxruntime.SessionOptions().register_custom_ops_library(library_path())
    extensions = ctypes.CDLL(extensions_path)
    try:
        add = extensions.AddExternalCustomOp
    except AttributeError as error:
        raise ImportError(
            "this onnxruntime-extensions cannot take operators of other libraries; "
            "run: pip install --upgrade onnxruntime-extensions"
        ) from error
    add.argtypes, add.restype = [ctypes.c_void_p], ctypes.c_bool
    index = 0
    while (custom_op := library.ort_ops_custom_op(index)) is not None:
        if not add(custom_op):
            raise RuntimeError(f"onnxruntime-extensions refused operator number {index} of {library_path()}")
        index += 1


@functools.cache
def _probe_model() -> bytes:
    """The smallest model that uses one of our operators."""
    from onnx import TensorProto, helper

    from ort_ops.operators import ADD_LAYER_NORM_GRAD

    shapes = {"dy": [1], "x1": [1], "rstd": [], "mean": [], "gamma": [1]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    output = helper.make_tensor_value_info("dx", TensorProto.FLOAT, [1])
    operands = ["dy", "x1", "", "rstd", "mean", "gamma"]
    node = helper.make_node(ADD_LAYER_NORM_GRAD.name, operands, ["dx"], domain=DOMAIN)
    graph = helper.make_graph([node], "ort_ops_probe", inputs, [output])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def _probe(session_options: onnxruntime.SessionOptions) -> Exception | None:
    """What creating a session of the probe model raises. Leaves the options as they were; writes nothing."""
    quiet = {"enable_profiling": False, "optimized_model_filepath": "", "log_severity_level": 4}
    before = {name: getattr(session_options, name) for name in quiet}
    try:
        for name, value in quiet.items():
            setattr(session_options, name, value)
        _import_onnxruntime().InferenceSession(_probe_model(), session_options, ["CPUExecutionProvider"])
    except Exception as error:
        return error
    finally:
        for name, value in before.items():
            setattr(session_options, name, value)
    return None


def _is_known_to(session_options: onnxruntime.SessionOptions) -> bool:
    # The options cannot be asked which libraries they hold, and a library registered twice makes every
    # session fail.
    return _probe(session_options) is None


def _refuse_conflicts(session_options: onnxruntime.SessionOptions) -> None:
    error = _probe(session_options)
    if error is None or not any(sign in str(error) for sign in ("Conflicting", "already set in registry")):
        return  # any other trouble has nothing to do with registration; the user's own session will tell it
    raise RuntimeError(
        f"these SessionOptions already hold operators of the domain {DOMAIN} from a library registered "
        "before ort_ops was used; make new SessionOptions and call ort_ops.register on them (it registers "
        "onnxruntime-extensions as well), or call it before you register other libraries"
    ) from error


def describe() -> dict[str, str]:
    """What was found, built and can run: a table of names and values, for `ort-ops info` and for reports."""
    from ort_ops.operators import OPERATORS

    library = load_library()
    facts = {
        "ort_ops": importlib.metadata.version("ort-ops"),
        "library": library_path(),
        "library version": library.ort_ops_version().decode(),
        "CPU instruction sets": library.ort_ops_cpu_targets().decode(),
        "instruction set in use": library.ort_ops_cpu_target().decode(),
        "operators on the CPU": ", ".join(operator.name for operator in OPERATORS),
        **_describe_cuda(library),
    }
    for package in (
        "onnxruntime",
        "onnxruntime-gpu",
        "onnxruntime-training-cpu",
        "onnxruntime-extensions",
        "onnx",
    ):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    try:
        facts["execution providers"] = ", ".join(_import_onnxruntime().get_available_providers())
    except ImportError as error:
        facts["execution providers"] = str(error)
    return facts


def _describe_cuda(library: ctypes.CDLL) -> dict[str, str]:
    """What the CUDA kernels were built for, and the device that they would run on or why they cannot."""
    library.ort_ops_cuda_architectures.restype = ctypes.c_char_p
    architectures = library.ort_ops_cuda_architectures().decode()
    if not architectures:
        return {"operators on CUDA": "none, built without"}
    description = ctypes.create_string_buffer(256)
    if library.ort_ops_cuda_device(description, ctypes.c_size_t(len(description))) == 0:
        device = description.value.decode()
    else:
        device = f"none can be used: {library.ort_ops_last_error().decode()}"
    return {
        "operators on CUDA": ", ".join(sorted(cuda_operators())),
        "CUDA architectures": architectures,
        "CUDA device": device,
    }
