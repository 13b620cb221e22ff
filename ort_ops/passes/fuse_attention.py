"""Attention written out in matrix products becomes one ScaledDotProductAttention.

As one node it is differentiated as one node, which transposes nothing and keeps one number per query where
the written-out form keeps all scores. What is recognised, for heads of query, key and value that were split
off by a Reshape to [batch, tokens, heads, size]:

    Transpose(MatMul(Softmax(scores), value heads)),  scores = MatMul(query heads, key heads^T)

where the heads are a Transpose (the key's may be two, or go through a Reshape to three axes, as PyTorch's
exporter writes them), the scores or either operand may be multiplied or divided by a number, and a mask that
no gradient is wanted of may be added. A mask that hides exactly what lies above the diagonal becomes the
operator's causal form. Three equal parts of one tensor go in as that tensor.

float16, bfloat16 and float64 are left alone: the operator takes float. So is attention with dropout.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ort_ops import operators

HEADS_FIRST = (0, 2, 1, 3)

_LARGEST_MASK = 1 << 24
"""Masks with more elements are not looked into."""

_HIDDEN = -1e30
"""What is added to a score to hide it: this or less, whether or not it is minus infinity."""


@dataclass(frozen=True)
class _Attention:
    """What was found: values of shape [batch, tokens, heads, size], and how the scores are made of them."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    mask: ir.Value | None
    scale: float
    result: ir.Value


def fuse_attention(model: ir.Model, trainable: Collection[ir.Value]) -> bool:
    """Replace written-out attention in place; returns whether there was any.

    trainable: the values that gradients are wanted of; a mask that depends on one of them stays.
    """
    reached = _depends_on(model.graph, trainable)
    fused = False
    for node in list(model.graph):
        if node.op_type == "Softmax" and node.domain == "":
            found = _find(node, reached)
            if found is not None:
                _replace(model.graph, found)
                fused = True
    if fused:
        model.opset_imports.setdefault(operators.DOMAIN, operators.ATTENTION.version)
        RemoveUnusedNodesPass()(model)
    return fused


def _depends_on(graph: ir.Graph, values: Collection[ir.Value]) -> set[ir.Value]:
    reached = set(values)
    for node in graph:
        if any(value in reached for value in node.inputs):
            reached.update(node.outputs)
    return reached


# -- finding -------------------------------------------------------------------------------------------------


def _find(softmax: ir.Node, reached: set[ir.Value]) -> _Attention | None:
    probabilities, scores = softmax.outputs[0], softmax.inputs[0]
    assert scores is not None
    if probabilities.dtype != ir.DataType.FLOAT or scores.shape is None or len(scores.shape) != 4:
        return None
    if softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    product = _only_reader(probabilities, "MatMul")
    if product is None or product.inputs[0] is not probabilities:
        return None
    result = _only_reader(product.outputs[0], "Transpose")
    value = _tokens_first(product.inputs[1], HEADS_FIRST)
    if result is None or _perm(result) != HEADS_FIRST or result.outputs[0].is_graph_output() or value is None:
        return None
    operands = _find_operands(scores)
    if operands is None:
        return None
    query, key, mask, scale = operands
    if not _fit(query, key, value) or (mask is not None and not _is_mask(mask, scores, query, key, reached)):
        return None
    found = _Attention(query, key, value, mask, scale, result.outputs[0])
    # The parts of one tensor have one batch, known or not.
    is_joined = _common_source(found) is not None and _joined_shape(found) is not None
    return found if is_joined or _have_one_batch(query, key, value) else None


def _find_operands(scores: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value | None, float] | None:
    """Query, key, mask and scale of scores = scale * query key^T + mask."""
    mask = None
    added = _producer(scores, "Add")
    if added is not None:
        left, right = added.inputs
        assert left is not None and right is not None
        is_swapped = _producer(_without_factor(right)[0], "MatMul") is not None
        scores, mask = (right, left) if is_swapped else (left, right)
    scores, scale = _without_factor(scores)
    product = _producer(scores, "MatMul")
    if product is None:
        return None
    query, query_factor = _without_factor(product.inputs[0])
    key, key_factor = _without_factor(product.inputs[1])
    query_tokens, key_tokens = _tokens_first(query, HEADS_FIRST), _key_tokens(key)
    if query_tokens is None or key_tokens is None:
        return None
    return query_tokens, key_tokens, mask, scale * query_factor * key_factor


def _without_factor(value: ir.Value | None) -> tuple[ir.Value, float]:
    """`value` as another value times a number."""
    assert value is not None
    factor = 1.0
    while (node := _producer(value, "Mul") or _producer(value, "Div")) is not None:
        left, right = node.inputs
        if _is_number(right):
            value, number = left, right
        elif _is_number(left) and node.op_type == "Mul":
            value, number = right, left
        else:
            break
        assert value is not None and number is not None and number.const_value is not None
        scale = float(number.const_value.numpy().item())
        factor *= scale if node.op_type == "Mul" else 1.0 / scale
    return value, factor


def _is_number(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.size == 1


def _tokens_first(value: ir.Value | None, perm: tuple[int, ...]) -> ir.Value | None:
    """The value [batch, tokens, heads, size] that `value` is a transpose of, by `perm`."""
    node = _producer(value, "Transpose")
    return node.inputs[0] if node is not None and _perm(node) == perm else None


def _key_tokens(columns: ir.Value) -> ir.Value | None:
    """The keys [batch, tokens, heads, size] that `columns`, [batch, heads, size, tokens], is made of."""
    tokens = _tokens_first(columns, (0, 2, 3, 1))
    if tokens is not None:
        return tokens
    heads = _tokens_first(columns, (0, 1, 3, 2))
    if heads is None:
        heads = _through_three_axes(columns)
    return _tokens_first(heads, HEADS_FIRST)


def _through_three_axes(columns: ir.Value) -> ir.Value | None:
    """The heads [batch, heads, tokens, size] of Reshape(Transpose(Reshape(heads), perm=[0, 2, 1]))."""
    outer = _producer(columns, "Reshape")
    rows = _tokens_first(outer.inputs[0], (0, 2, 1)) if outer is not None else None
    inner = _producer(rows, "Reshape")
    heads = inner.inputs[0] if inner is not None else None
    if heads is None or heads.shape is None or columns.shape is None or rows is None or rows.shape is None:
        return None
    known = heads.shape.is_static() and columns.shape.is_static() and rows.shape.is_static()
    if not known or len(heads.shape) != 4:
        return None
    batch, count, tokens, size = heads.shape.numpy()
    same = columns.shape.numpy() == (batch, count, size, tokens)
    return heads if same and rows.shape.numpy() == (batch * count, tokens, size) else None


def _fit(query: ir.Value, key: ir.Value, value: ir.Value) -> bool:
    """Whether the three surely have the operator's shapes but for the batch: heads and size known."""
    shapes = [part.shape for part in (query, key, value)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        return False
    first, second, third = shapes
    assert first is not None and second is not None and third is not None
    if not all(isinstance(size, int) for size in first[2:]):
        return False
    same_heads = tuple(first[2:]) == tuple(second[2:]) == tuple(third[2:])
    return same_heads and _same(second[1], third[1])


def _have_one_batch(query: ir.Value, key: ir.Value, value: ir.Value) -> bool:
    assert query.shape is not None and key.shape is not None and value.shape is not None
    return _same(query.shape[0], key.shape[0]) and _same(key.shape[0], value.shape[0])


def _same(left: int | ir.SymbolicDim, right: int | ir.SymbolicDim) -> bool:
    return left == right and (isinstance(left, int) or left.value is not None)


def _is_mask(
    mask: ir.Value, scores: ir.Value, query: ir.Value, key: ir.Value, reached: set[ir.Value]
) -> bool:
    """Whether `mask` is a constant of the differentiation, and is broadcast to the scores, not they to it."""
    if mask in reached or mask.dtype != ir.DataType.FLOAT or mask.shape is None:
        return False
    assert scores.shape is not None and query.shape is not None and key.shape is not None
    expected = [query.shape[0], query.shape[2], query.shape[1], key.shape[1]]
    if not 1 <= len(mask.shape) <= 4:
        return False
    own = expected[-len(mask.shape) :]
    fits = all(size == 1 or _same(size, wide) for size, wide in zip(mask.shape, own, strict=True))
    return fits or all(map(_same, scores.shape, expected))


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == "" else None


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    readers = [use.node for use in value.uses()]
    if len(readers) != 1 or value.is_graph_output():
        return None
    return readers[0] if readers[0].op_type == op_type and readers[0].domain == "" else None


def _perm(node: ir.Node) -> tuple[int, ...]:
    return tuple(node.attributes.get_ints("perm", ()))


# -- replacing -----------------------------------------------------------------------------------------------


def _replace(graph: ir.Graph, found: _Attention) -> None:
    end = found.result.producer()
    assert end is not None
    is_causal = found.mask is not None and _is_causal(found.mask)
    nodes, operands = _operands(graph, found)
    mask = None if is_causal else found.mask
    node = ir.node(
        operators.ATTENTION.name,
        [*operands, mask] if mask is not None or len(operands) == 1 else operands,
        {"scale": found.scale, "visibility": "causal" if is_causal else "all"},
        domain=operators.DOMAIN,
        num_outputs=2,
        name=f"{end.name or found.result.name}/attention",
    )
    result, sums = node.outputs
    result.name, sums.name = f"{found.result.name}_attention", f"{found.result.name}_log_sum_exp"
    result.type, result.shape = found.result.type, found.result.shape
    sums.type = ir.TensorType(ir.DataType.FLOAT)
    query = found.query.shape
    assert query is not None
    sums.shape = ir.Shape([query[0], query[2], query[1]])
    graph.insert_before(end, [*nodes, node])
    ir.convenience.replace_all_uses_with(found.result, result)


def _operands(graph: ir.Graph, found: _Attention) -> tuple[list[ir.Node], list[ir.Value | None]]:
    """The nodes that make query, key and value, and these: one value if they are parts of one."""
    source = _common_source(found)
    shape = None if source is None else _joined_shape(found)
    if shape is None:
        return [], [found.query, found.key, found.value]
    name = f"{found.query.name}_key_value"
    sizes = ir.Value(
        name=f"{name}_shape", const_value=ir.tensor(np.array(shape, np.int64), name=f"{name}_shape")
    )
    sizes.dtype, sizes.shape = ir.DataType.INT64, ir.Shape([5])
    graph.register_initializer(sizes)
    node = ir.node("Reshape", [source, sizes], name=name)
    joined = node.outputs[0]
    query = found.query.shape
    assert query is not None
    joined.name, joined.type = f"{name}_joined", found.query.type
    joined.shape = ir.Shape([query[0], query[1], 3, query[2], query[3]])
    return [node], [joined, None, None]


def _common_source(found: _Attention) -> ir.Value | None:
    """The tensor whose three parts along its last axis are query, key and value, in this order."""
    nodes = [_producer(part, "Reshape") for part in (found.query, found.key, found.value)]
    parts = [node.inputs[0] if node is not None else None for node in nodes]
    split = _producer(parts[0], "Split")
    if split is None or tuple(split.outputs) != tuple(parts):
        return None
    source = split.inputs[0]
    if source is None or source.shape is None:
        return None
    sizes = split.inputs[1] if len(split.inputs) > 1 else None
    if sizes is not None and (sizes.const_value is None or len(set(sizes.const_value.numpy().tolist())) != 1):
        return None
    width = source.shape[-1]
    is_whole = isinstance(width, int) and width % 3 == 0
    rank = len(source.shape)
    return source if is_whole and split.attributes.get_int("axis", 0) % rank == rank - 1 else None


def _joined_shape(found: _Attention) -> list[int] | None:
    """[batch, tokens, 3, heads, size], with -1 for the batch if it is not known."""
    shapes = [part.shape for part in (found.query, found.key, found.value)]
    query = shapes[0]
    assert query is not None
    if not isinstance(query[1], int) or any(shape is None or shape[1] != query[1] for shape in shapes):
        return None
    sizes = [size if isinstance(size, int) else -1 for size in (query[0], query[1], 3, query[2], query[3])]
    return sizes if 0 not in sizes else None


def _is_causal(mask: ir.Value) -> bool:
    """Whether the mask is known, and hides exactly what lies above the diagonal."""
    shape = mask.shape
    if shape is None or not shape.is_static() or len(shape) < 2 or np.prod(shape.numpy()) > _LARGEST_MASK:
        return False
    numbers = _contents(mask)
    if numbers is None:
        return False
    seen = np.tri(*numbers.shape[-2:]).astype(bool)
    return bool((np.where(seen, numbers, 0.0) == 0.0).all() and (numbers <= _HIDDEN)[..., ~seen].all())


def _contents(value: ir.Value) -> np.ndarray | None:
    """What `value` holds, if it follows from constants."""
    if value.const_value is not None:
        return value.const_value.numpy()
    nodes: list[ir.Node] = []
    constants: dict[str, ir.Value] = {}
    if not _collect(value, nodes, constants):
        return None
    graph = value.producer().graph  # type: ignore[union-attr]
    assert graph is not None
    made = onnx.helper.make_graph(
        [ir.to_proto(node) for node in nodes],
        "constant",
        [],
        [onnx.ValueInfoProto(name=str(value.name))],
        [onnx.numpy_helper.from_array(c.const_value.numpy(), name) for name, c in constants.items()],  # type: ignore[union-attr]
    )
    opsets = [onnx.helper.make_opsetid("", graph.opset_imports[""])]
    found = ReferenceEvaluator(onnx.helper.make_model(made, opset_imports=opsets)).run(None, {})
    return np.asarray(list(found)[0])


def _collect(value: ir.Value, nodes: list[ir.Node], constants: dict[str, ir.Value]) -> bool:
    """Put the nodes and constants that `value` follows from into the lists, in order; False if anything
    else."""
    if value.const_value is not None:
        constants[str(value.name)] = value
        return True
    node = value.producer()
    if node is None or node.domain != "":
        return False
    if node not in nodes:
        if not all(_collect(source, nodes, constants) for source in node.inputs if source is not None):
            return False
        nodes.append(node)
    return True
