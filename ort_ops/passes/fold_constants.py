"""What can be computed now is computed now: shapes above all, and the branch of an If with a constant
condition."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript import optimizer

LARGEST_ELEMENTS = 1024
"""Only small tensors are folded: enough for shapes, axes and conditions, too little to make the file grow."""


def fold_constants(model: ir.Model) -> bool:
    """Fold constants in place; returns whether anything changed. Trainable tensors are graph inputs and
    stay."""
    result = optimizer.fold_constants(
        model,
        onnx_shape_inference=True,
        input_size_limit=LARGEST_ELEMENTS,
        output_size_limit=LARGEST_ELEMENTS,
    )
    if result.modified:
        RemoveUnusedNodesPass()(model)  # folding leaves copies behind that nobody reads
    return bool(result.modified)
