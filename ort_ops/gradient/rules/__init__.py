"""All derivative rules. Importing this package registers them (see ort_ops/gradient/registry.py)."""

from ort_ops.gradient.rules import activation, conv, elementwise, linalg, loss, nondiff, norm, recurrent, reduce, resample, runtime, shape

__all__ = ["activation", "conv", "elementwise", "linalg", "loss", "nondiff", "norm", "recurrent", "reduce", "resample", "runtime", "shape"]
