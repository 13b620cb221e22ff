"""An Add of two tensors of one shape and the LayerNormalization of its result become one AddLayerNorm.

It reads and writes the sum once where the two nodes do so twice, and keeps the sum for whoever reads it: the
residual branch and the backward pass. Left alone are Adds that broadcast, scales and biases that are not
exactly of the normalised axes' shape or that nodes of the graph make, float64, and statistics in a type other
than float.
"""

from __future__ import annotations

from itertools import zip_longest

import onnx_ir as ir

from ort_ops import operators

_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

_LARGEST_RANK = 8
"""What the operator's kernel takes."""


def fuse_add_layer_norm(model: ir.Model) -> bool:
    """Replace pairs of nodes in place; returns whether there were any. Needs types and shapes."""
    fused = False
    for node in list(model.graph):
        add = _addition(node)
        if add is not None:
            _replace(model.graph, add, node)
            fused = True
    if fused:
        model.opset_imports.setdefault(operators.DOMAIN, operators.ADD_LAYER_NORM.version)
    return fused


def _addition(norm: ir.Node) -> ir.Node | None:
    """The Add that `norm`, a LayerNormalization, is to be joined with; None if there is none."""
    if norm.op_type != "LayerNormalization" or norm.domain != "":
        return None
    total, *affine = norm.inputs
    assert total is not None
    add = total.producer()
    if add is None or (add.op_type, add.domain) != ("Add", "") or add.graph is not norm.graph:
        return None
    stash = norm.attributes.get_int("stash_type", int(ir.DataType.FLOAT))
    if total.dtype not in _TYPES or stash != ir.DataType.FLOAT:
        return None
    if total.shape is None or len(total.shape) > _LARGEST_RANK:
        return None
    normalised = total.shape[norm.attributes.get_int("axis", -1) % len(total.shape) :]
    fits = all(_has_shape(value, total.shape) for value in add.inputs) and all(
        value is None or (value.producer() is None and _has_shape(value, normalised)) for value in affine
    )
    return add if fits else None


def _has_shape(value: ir.Value | None, shape: ir.Shape | tuple[int | ir.SymbolicDim, ...]) -> bool:
    """Whether `value` surely has the shape `shape`."""
    if value is None or value.shape is None:
        return False
    return all(
        size == wanted and (isinstance(size, int) or (size is not None and size.value is not None))
        for size, wanted in zip_longest(value.shape, shape)
    )


def _replace(graph: ir.Graph, add: ir.Node, norm: ir.Node) -> None:
    # At the place of the Add: all that either node reads is there already, and its readers come later.
    old = [*norm.outputs, *[None] * (3 - len(norm.outputs)), add.outputs[0]]
    norm_reads = [value for value in norm.inputs[1:] if value is not None]
    read = [value is not None and _is_read_elsewhere(value, norm) for value in old]
    made = ir.node(
        operators.ADD_LAYER_NORM.name,
        [*add.inputs, *norm_reads],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        domain=operators.DOMAIN,
        num_outputs=max((index + 1 for index, is_read in enumerate(read) if is_read), default=1),
        name=norm.name,
    )
    graph.insert_before(add, made)
    names = [value.name if value is not None else "" for value in old]
    for before, after in zip(old, made.outputs, strict=False):
        if before is None:
            after.name = ""
            continue
        after.type, after.shape = before.type, before.shape
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    graph.remove([norm, add], safe=True)
    for value, name in zip(made.outputs, names, strict=False):
        value.name = name


def _is_read_elsewhere(value: ir.Value, norm: ir.Node) -> bool:
    return value.is_graph_output() or any(use.node is not norm for use in value.uses())
