"""Raises the default domain's opset, so that later passes and rules know one form of each operator only."""

from __future__ import annotations

import onnx
import onnx.version_converter
import onnx_ir as ir

from ort_ops.passes.data_free import without_data
from ort_ops.passes.errors import PassError


def upgrade_opset(model: ir.Model, oldest: int) -> ir.Model:
    """The model at opset `oldest` of the default domain if it was older, else the model itself.

    Raises:
        PassError: onnx cannot convert one of the model's operators.
    """
    version = model.opset_imports.get("", oldest)
    model.opset_imports.setdefault("", version)
    if version >= oldest:
        return model
    try:
        return without_data(model, lambda proto: onnx.version_converter.convert_version(proto, oldest))
    except RuntimeError as error:
        raise PassError(
            f"the model cannot be raised from opset {version} to {oldest}, the oldest that gradients are built for: "
            f"{error}; export it with opset_version={oldest} or newer"
        ) from error
