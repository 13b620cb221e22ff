"""From PyTorch modules to models that train on the stock runtime, and trained values back.

    training_model_from_torch(module, example_inputs, loss=..., ...)   the files of a training
    forward_model_from_torch(module, example_inputs, ...)              a forward model alone
    load_into_torch(module, checkpoint)                                trained values into the module, by name

PyTorch is needed for these three, and not for the training.
"""

try:
    import torch as torch
except ImportError as error:
    raise ImportError("ort_ops.export needs PyTorch 2.6 or newer: pip install 'ort-ops[torch]'") from error

from ort_ops.export.errors import ExportError
from ort_ops.export.forward_model import forward_model_from_torch
from ort_ops.export.load import load_into_torch
from ort_ops.export.training_model import training_model_from_torch

__all__ = ["ExportError", "forward_model_from_torch", "load_into_torch", "training_model_from_torch"]
