"""From an evaluation model and trained parameters to a model for inference."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from ort_ops import passes
from ort_ops.training.model_file import Model, existing_file, read_model
from ort_ops.training.whole_files import whole_files

_LARGEST_MESSAGE_BYTES = 2**31 - 1
"""Protocol buffers end here; a larger model keeps its tensors in a file of their own."""

EXTERNAL_DATA_SUFFIX = ".data"


def write_inference_model(
    evaluation_model: Model,
    parameters: Mapping[str, np.ndarray],
    output_names: Sequence[str],
    path: str | os.PathLike[str],
) -> None:
    """Write to `path` the part of the model that computes `output_names`, any values inside it, with
    `parameters` as initializers and without the inputs that it does not need, such as labels.

    A model beyond 2 GiB has its tensors in `<path>.data`. Raises ValueError for names that are no values of
    the model, TypeError for a single one that is not in a list.
    """
    if isinstance(evaluation_model, (str, os.PathLike)):
        model = ir.load(existing_file(evaluation_model))
    else:
        model = ir.from_proto(read_model(evaluation_model, external_data=False))
    graph = model.graph
    passes.infer_shapes(model)
    values = {value.name: value for node in graph for value in node.outputs}
    values |= {value.name: value for value in graph.inputs}
    _check_names(output_names, [str(name) for name in values if name])
    graph.outputs[:] = [values[name] for name in output_names]
    for value in list(graph.inputs):
        if value.name in parameters:
            graph.inputs.remove(value)
            value.const_value = ir.tensor(parameters[str(value.name)], name=value.name)
            graph.register_initializer(value)
    for clean in (RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):
        clean(model)
    for value in list(graph.inputs):
        if not value.uses() and value not in graph.outputs:
            graph.inputs.remove(value)
    _save(model, Path(path))


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    if isinstance(names, str):
        raise TypeError(f"graph_output_names must be a list of names; got {names!r}. Write [{names!r}].")
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        near = difflib.get_close_matches(unknown[0], known, n=1) if unknown else []
        raise ValueError(
            "graph_output_names must name values of the evaluation model, at least one; got "
            f"{', '.join(map(repr, unknown)) or 'none'}" + (f" (did you mean '{near[0]}'?)." if near else ".")
        )


def _save(model: ir.Model, path: Path) -> None:
    """Write so that what is at `path` is always whole."""
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    with whole_files(path.parent) as unfinished:
        if size > _LARGEST_MESSAGE_BYTES:
            ir.save(model, unfinished / path.name, external_data=path.name + EXTERNAL_DATA_SUFFIX)
        else:
            ir.save(ir.external_data.load_to_model(model), unfinished / path.name)
