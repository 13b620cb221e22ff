"""All derivative rules. Importing this package registers them (see ort_ops/gradient/registry.py)."""

from ort_ops.gradient.rules import (
    activation,
    control_flow,
    conv,
    elementwise,
    grid_sample,
    linalg,
    loss,
    nondiff,
    norm,
    quantize,
    recurrent,
    reduce,
    resample,
    runtime,
    shape,
    signal,
)

__all__ = [
    "activation",
    "control_flow",
    "conv",
    "elementwise",
    "grid_sample",
    "linalg",
    "loss",
    "nondiff",
    "norm",
    "quantize",
    "recurrent",
    "reduce",
    "resample",
    "runtime",
    "shape",
    "signal",
]
