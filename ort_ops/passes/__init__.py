"""Graph-to-graph rewrites that bring a model as people export it into the form that differentiation reads.

One file per pass. `prepare` runs them in the order that they need each other:

1. `inline_functions`: functions that the model brings along become plain nodes, so that all later passes see
   them;
2. `upgrade_opset`: to opset 18 at least, so that nobody later needs to know older forms of an operator;
3. `time_first`: recurrent nodes into the layout that the runtime has kernels for;
4. `infer_shapes`: types and shapes, which the next ones read;
5. `fold_constants`: shapes computed in the graph become constants, an If with a constant condition becomes
   its branch; may uncover more shapes, so they are inferred again;
6. `fuse_layer_norm`: needs constant axes and known ranks.

`fuse_cross_entropy`, `fuse_attention` and `fuse_linear` come after them, because only differentiation gains
by them and the last two must know what gradients are wanted of; then `expand_functions`, when differentiation
knows which nodes it has no rule for; `keep_dropout` and `fuse_add_layer_norm` follow differentiation, which
gives masks, sums and statistics their readers. Two passes are for who trains and runs models:
`mixed_precision` comes before differentiation, `round_on_cpu` last of all.

`use_add_layer_norm_grad` is for training graphs that were built elsewhere, so it stands alone.

Passes never look at large tensors: what goes through the onnx package goes without them (`data_free`).
"""

from __future__ import annotations

import onnx_ir as ir

from ort_ops.passes.errors import PassError
from ort_ops.passes.expand_functions import expand_functions
from ort_ops.passes.fold_constants import fold_constants
from ort_ops.passes.fuse_add_layer_norm import fuse_add_layer_norm
from ort_ops.passes.fuse_attention import fuse_attention
from ort_ops.passes.fuse_cross_entropy import fuse_cross_entropy
from ort_ops.passes.fuse_layer_norm import fuse_layer_norm
from ort_ops.passes.fuse_linear import fuse_linear
from ort_ops.passes.infer_shapes import infer_shapes
from ort_ops.passes.inline_functions import inline_functions
from ort_ops.passes.keep_dropout import keep_dropout
from ort_ops.passes.mixed_precision import mixed_precision
from ort_ops.passes.round_on_cpu import has_16_bit_tensors, round_on_cpu
from ort_ops.passes.time_first import time_first
from ort_ops.passes.upgrade_opset import upgrade_opset
from ort_ops.passes.use_add_layer_norm_grad import use_add_layer_norm_grad

__all__ = [
    "PassError",
    "expand_functions",
    "fold_constants",
    "fuse_add_layer_norm",
    "fuse_attention",
    "fuse_cross_entropy",
    "fuse_layer_norm",
    "fuse_linear",
    "has_16_bit_tensors",
    "infer_shapes",
    "inline_functions",
    "keep_dropout",
    "mixed_precision",
    "prepare",
    "round_on_cpu",
    "time_first",
    "upgrade_opset",
    "use_add_layer_norm_grad",
]


def prepare(model: ir.Model, oldest_opset: int) -> ir.Model:
    """Run passes 1 to 6; returns the new model (the given one is used up).

    Args:
        model: the model; values that must not be folded away (trainable ones) are graph inputs.
        oldest_opset: the default domain is raised to this version if it is older.

    Raises:
        PassError: a pass cannot handle the model; the message says what and where.
    """
    model = inline_functions(model)
    model = upgrade_opset(model, oldest_opset)
    time_first(model)
    infer_shapes(model)
    if fold_constants(model):
        infer_shapes(model)
    if fuse_layer_norm(model):
        infer_shapes(model)
    return model
