"""Models with one operator node, made for given inputs, and running them in ONNX Runtime with every
tensor type.

NumPy has no bfloat16 of its own and ONNX Runtime's Python interface none for it; `run_session` goes
through OrtValue.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnxruntime
from oracle import BFLOAT16, Inputs

from ort_ops.operators import ADD_LAYER_NORM_GRAD, DOMAIN

OUTPUTS = ("dx", "dgamma", "dbeta")


def make_model(
    inputs: Inputs,
    outputs: Sequence[str] = OUTPUTS,
    *,
    symbolic: bool = False,
    declare_outputs: bool = True,
    opset: int = 17,
    ir_version: int = 9,
    node_name: str = "norm_grad",
) -> onnx.ModelProto:
    """A model of one AddLayerNormGrad node that fits these inputs, without a function body.

    `outputs` are the node's outputs by position, "" for one that is not wanted. With `symbolic`, no shape
    says more than its rank. Without `declare_outputs`, the graph outputs' types are left to the reader's
    type inference.
    """
    present = inputs.arrays()
    names = [slot.name if slot.name in present else "" for slot in ADD_LAYER_NORM_GRAD.inputs]
    while not names[-1]:
        names.pop()
    node = onnx.helper.make_node(ADD_LAYER_NORM_GRAD.name, names, list(outputs), node_name, domain=DOMAIN)

    def value(name: str, shape: Sequence[int], elem_type: int) -> onnx.ValueInfoProto:
        dims = [f"{name}_{axis}" for axis in range(len(shape))] if symbolic else list(shape)
        return onnx.helper.make_tensor_value_info(name, elem_type, dims)

    types = {
        "dx": (inputs.dy.shape, elem_type(inputs.dy.dtype)),
        "dgamma": (inputs.gamma.shape, onnx.TensorProto.FLOAT),
        "dbeta": (inputs.gamma.shape, onnx.TensorProto.FLOAT),
    }
    graph = onnx.helper.make_graph(
        [node],
        "one_node",
        [value(name, array.shape, elem_type(array.dtype)) for name, array in present.items()],
        [
            value(name, *types[name]) if declare_outputs else onnx.ValueInfoProto(name=name)
            for name in outputs
            if name
        ],
    )
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def elem_type(dtype: np.dtype) -> int:
    """ONNX's number for a NumPy (or ml_dtypes) type."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def run_session(
    session: onnxruntime.InferenceSession, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The session's outputs by name."""
    feeds = {name: to_ort_value(array) for name, array in arrays.items()}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(to_numpy, session.run_with_ort_values(names, feeds)), strict=True))


def to_ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    if array.dtype == BFLOAT16:
        bits = np.ascontiguousarray(array).view(np.uint16).reshape(array.shape)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def to_numpy(value: onnxruntime.OrtValue) -> np.ndarray:
    if value.element_type() != onnx.TensorProto.BFLOAT16:
        return value.numpy()
    shape = tuple(value.shape())
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, ml_dtypes.bfloat16)
    bits = (ctypes.c_uint16 * count).from_address(value.data_ptr())
    return np.ctypeslib.as_array(bits).copy().view(ml_dtypes.bfloat16).reshape(shape)
