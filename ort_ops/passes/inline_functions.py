"""Functions that the model brings along (`ModelProto.functions`) become plain nodes."""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx_ir as ir

from ort_ops.operators import DOMAIN
from ort_ops.passes.data_free import without_data
from ort_ops.passes.errors import PassError


def inline_functions(model: ir.Model) -> ir.Model:
    """The model with every call of its own functions replaced by the function's body, nested ones too.

    Functions of the plugin's domain stay calls, and only their bodies go: what they stand for has a
    derivative of its own, which the body would not have.

    Raises:
        PassError: a body is written for an opset that cannot be converted to the model's.
    """
    for identifier in list(model.functions):
        if identifier[0] == DOMAIN:
            del model.functions[identifier]
    if not model.functions:
        return model
    try:
        return without_data(
            model, lambda proto: onnx.inliner.inline_local_functions(proto, convert_version=True)
        )
    except RuntimeError as error:
        raise PassError(f"the model's own functions cannot be inlined: {error}") from error
