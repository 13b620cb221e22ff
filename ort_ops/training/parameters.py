"""Which tensors of a model are trained, which are parameters that stay as they are, which are constants."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ort_ops.gradient.paths import FLOATS, captured, reachable

LARGEST_WEIGHT = 1e30
"""A tensor with a number as large in it is no parameter, nor one with the largest of its type, which masks
hold."""

LITERAL = re.compile(r"(^|/)Constant(_\d+)?_output_\d+$")
"""How PyTorch's older exporter names the numbers that a program contains."""

SINGLE_LITERAL = re.compile(r"^val_\d+$")
"""How its newer one names them, such as the scale of attention, but also matrices that it has transposed:
only tensors of one element are no parameters for this name."""

_CLOSE_NAMES = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParameterNames:
    """Names of initializers, in the graph's order.

    Attributes:
        trainable: those that get gradients.
        frozen: those that are inputs of the models and part of the checkpoint without being trained.
    """

    trainable: tuple[str, ...]
    frozen: tuple[str, ...]


def give_equal_parameters_tensors_of_their_own(graph: ir.Graph) -> None:
    """Undo, in place, what PyTorch's older exporter does to a model in evaluation mode: of parameters that
    are equal, such as the ones and zeros of norms before training, it stores one, and writes the others as
    `Identity` of that. They would be trained as if they were tied.

    Only tensors whose elements all have one value are taken apart: others are equal by intention.
    """
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Identity" and node.domain == "" else None
        output = node.outputs[0]
        if source is None or output.is_graph_output() or not _has_one_value(source):
            continue
        assert source.const_value is not None
        tensor = ir.tensor(source.const_value.numpy(), source.dtype, name=output.name)
        own = ir.Value(name=output.name, type=source.type, shape=source.shape, const_value=tensor)
        output.replace_all_uses_with(own)
        graph.remove(node, safe=True)
        graph.register_initializer(own)


def _has_one_value(value: ir.Value) -> bool:
    """Whether a value is a float initializer with axes, read more than once, whose elements are all equal."""
    if not (value.is_initializer() and len(value.uses()) > 1 and _is_parameter(value)):
        return False
    numbers = value.const_value.numpy()  # type: ignore[union-attr]
    return bool(np.all(numbers == numbers.flat[0]))


def choose_parameters(
    model: ir.Model,
    loss: ir.Value,
    requires_grad: Sequence[str] | None,
    frozen_params: Sequence[str],
    statistics: Collection[str],
    constants: Collection[str],
) -> ParameterNames:
    """Sort the initializers of `model`, whose types are inferred.

    Args:
        requires_grad: names or patterns (`*`, `?`) of the tensors to train; None for every parameter that
            reaches the loss and is not frozen. What counts as a parameter: a float tensor with at least one
            axis, no infinite or NaN element and none of 1e30 or its type's largest (attention masks), whose
            name is not one that an exporter gives to a number of the program (`LITERAL`, `SINGLE_LITERAL`).
            Tensors without axes are trained only if named in full: exporters write factors of the computation
            so.
        frozen_params: names or patterns of tensors that are frozen.
        statistics: names of the running statistics of normalizations, which are always frozen.
        constants: names of tensors that are no parameters, though they look like one.

    A tensor of `requires_grad` that the loss does not depend on at all is frozen instead, with a warning. One
    that several nodes read although all its elements are equal is warned of: see `_warn_of_merged`.

    Raises:
        ValueError: a name or pattern matches nothing, a tensor is named in both, is not a float tensor, or is
            one of the statistics; nothing is left to train.
    """
    initializers = model.graph.initializers
    known = [name for name, value in initializers.items() if _is_parameter(value) and name not in constants]
    frozen = set(_matching("frozen_params", frozen_params, known, initializers)) | set(statistics)
    if requires_grad is None:
        candidates = [initializers[name] for name in known if name not in frozen]
        chosen = {str(value.name) for value in reachable(model.graph, model.opset_imports, loss, candidates)}
        _log.info("training %d tensors that reach the loss: %s", len(chosen), ", ".join(chosen))
    else:
        chosen = set(_matching("requires_grad", requires_grad, known, initializers))
        _refuse_both(chosen, frozen, statistics)
        unused = chosen - _names_behind(loss)
        if unused:
            _log.warning("the loss does not depend on %s; it stays as it is", ", ".join(sorted(unused)))
        chosen, frozen = chosen - unused, frozen | unused
    if not chosen:
        raise ValueError(
            f"There is nothing to train: no parameter reaches the loss {loss.name!r}. Name tensors in "
            f"requires_grad; the model's float tensors are {_listed(known)}."
        )
    _warn_of_merged([initializers[name] for name in initializers if name in chosen])
    return ParameterNames(
        tuple(name for name in initializers if name in chosen),
        tuple(name for name in initializers if name in frozen),
    )


def _warn_of_merged(trained: Sequence[ir.Value]) -> None:
    """PyTorch's newer exporter merges parameters that are equal, such as the ones and zeros of norms before
    training. The model cannot say whether they were tied by intention."""
    merged = [str(value.name) for value in trained if len(value.uses()) > 1 and _has_one_value(value)]
    if merged:
        _log.warning(
            "several nodes read %s, whose elements are all equal. If those were parameters of their own that "
            "an exporter has merged, they are trained as one: export with torch.onnx.export(..., "
            "optimize=False)",
            ", ".join(merged),
        )


def _is_parameter(value: ir.Value) -> bool:
    tensor = value.const_value
    if value.dtype not in FLOATS or tensor is None or len(tensor.shape) == 0:
        return False
    if LITERAL.search(str(value.name)):
        return False
    numbers = tensor.numpy()
    if numbers.size == 0 or (numbers.size == 1 and SINGLE_LITERAL.search(str(value.name))):
        return False
    limit = min(LARGEST_WEIGHT, float(ml_dtypes.finfo(numbers.dtype).max))
    # A minimum and a maximum instead of abs(), which would copy the weights.
    return -limit < float(np.min(numbers)) and float(np.max(numbers)) < limit


def _matching(
    argument: str, patterns: Sequence[str], known: Sequence[str], initializers: Collection[str]
) -> Iterator[str]:
    """The initializers of these names, and the parameters that match these patterns."""
    if isinstance(patterns, str):
        raise ValueError(f"{argument} must be a list of names; got the string {patterns!r}.")
    for pattern in patterns:
        if pattern in initializers:
            found = [pattern]
        else:
            found = [name for name in known if fnmatchcase(name, pattern)]
        if not found:
            close = difflib.get_close_matches(pattern, list(initializers), n=_CLOSE_NAMES, cutoff=0.4)
            near = f"close to it: {', '.join(map(repr, close))}" if close else f"there are {_listed(known)}"
            raise ValueError(
                f"{argument} names {pattern!r}, which matches no tensor that the model stores; {near}."
            )
        yield from found


def _refuse_both(chosen: set[str], frozen: set[str], statistics: Collection[str]) -> None:
    for name in sorted(chosen & frozen):
        if name in statistics:
            raise ValueError(
                f"requires_grad names {name!r}, a running statistic of a BatchNormalization, which the "
                "forward pass updates; take it out of requires_grad."
            )
        raise ValueError(
            f"{name!r} is in requires_grad and in frozen_params, but a tensor is either trained or frozen; "
            "take it out of one of them."
        )


def _names_behind(loss: ir.Value) -> set[str]:
    """Names of all values that the loss depends on, by whatever operators."""
    names: set[str] = set()
    waiting = [loss]
    while waiting:
        value = waiting.pop()
        if str(value.name) in names:
            continue
        names.add(str(value.name))
        producer = value.producer()
        if producer is not None:
            waiting.extend(read for read in [*producer.inputs, *captured(producer)] if read is not None)
    return names


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most])) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
