"""The operators that only onnxruntime-training has, written in standard operators or ours.

Writing a replacement
---------------------
A replacement is a small pure function of one `PeerNode`. It returns the values of the node's outputs, in
their order, as far as they can be read::

    @replaces("TanhGrad")
    def tanh_grad(c: PeerNode) -> Results:
        dy, y = c.x(0), c.x(1)
        return (c.op("Mul", dy, c.op("Sub", 1.0, c.op("Mul", y, y))),)

`replace_peer_operators` does the rest: it puts the new nodes in the place of the old one under the old names
and drops what nobody reads. Replacements are written for opset 18.

Formulas: each is that of the operator's CPU kernel in onnxruntime-training 1.19.2, with which the tests
compare it. Where a gradient is more than a line, the derivative rule of the forward operator writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ort_ops import operators
from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.emitter import Emitter, NameScope
from ort_ops.gradient.paths import describe
from ort_ops.gradient.rules.activation import sigmoid_gate_slope
from ort_ops.gradient.rules.conv import average_pool, conv, conv_transpose, max_pool
from ort_ops.gradient.rules.recurrent import gru, lstm

PEER_DOMAIN = "com.microsoft"

Results = Sequence[ir.Value | None]
"""The values of a node's outputs; None for one that is surely not read."""

WITHOUT_REPLACEMENT = frozenset(
    """AdamWOptimizer ATen BiasSoftmaxDropout BitmaskDropoutGrad FlattenAndUnpad
    Group InPlaceAccumulator InPlaceAccumulatorV2 InplaceClipGradNorm
    MegatronF MegatronG MemcpyFromHost MixedPrecisionScale PadAndUnflatten PassThrough PythonOp PythonOpGrad
    Recv ResizeGrad SGDOptimizerV2 Send ShrunkenGather SoftmaxCrossEntropyLossInternal
    SoftmaxCrossEntropyLossInternalGrad SoftmaxDropoutGrad View YieldOp ZeroGradient""".split()
)
"""Operators that only onnxruntime-training has and that are not replaced."""


class PeerNode(Vjp):
    """One node of onnxruntime-training as its replacement sees it: what it reads, and a pen.

    It is the view that derivative rules have of a forward node (see gradient/driver.py), so their helpers can
    be used; but what is read are the gradient node's own inputs, in its order.
    """

    def __init__(self, node: ir.Node, emit: Emitter, opset: int) -> None:
        self.node = node
        self.emit = emit
        self.op = emit.op
        self.multi = emit.multi
        self.opset = opset

    def x(self, index: int) -> ir.Value:
        """Input `index`, which must be there. One of unknown type is float: nothing else is trained there."""
        if not self.has(index):
            raise self.fail(f"input {index} is missing")
        value = super().x(index)
        if value.dtype is None:
            value.dtype = ir.DataType.FLOAT
        return value

    def sizes(self, index: int) -> ir.Value:
        """Input `index`, a shape or another list of integers."""
        if self.has(index) and super().x(index).dtype is None:
            super().x(index).dtype = ir.DataType.INT64
        return self.x(index)

    def reads(self, index: int) -> bool:
        """Whether output `index` is read."""
        outputs = self.node.outputs
        return index < len(outputs) and (bool(outputs[index].uses()) or outputs[index].is_graph_output())

    def shape(self, value: ir.Value) -> ir.Value:
        known = self.static_shape(value)
        return self.emit.ints(known) if known is not None else self.op("Shape", value)

    def zeros(self, sizes: ir.Value) -> ir.Value:
        """Zeros of the type of the node's data and of the shape that `sizes` says."""
        return self.op("ConstantOfShape", sizes, value=self.emit.zero(self.dtype))

    def zeros_like(self, value: ir.Value) -> ir.Value:
        return self.op("ConstantOfShape", self.shape(value), value=self.emit.zero(value.dtype))


class _Replayed(PeerNode):
    """A gradient node as the forward node that it belongs to, for that operator's derivative rule.

    `inputs` and `outputs` are the forward node's, `gradients` those of its outputs. The gradient of input i
    is output `places[i]`. Attributes are the same on both.
    """

    def __init__(
        self,
        c: PeerNode,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        gradients: Sequence[ir.Value | None],
        places: Sequence[int | None] = (0, 1, 2),
    ) -> None:
        super().__init__(c.node, c.emit, c.opset)
        self._inputs = inputs
        self._outputs = outputs
        self._gradients = gradients
        self._places = places

    def optional(self, index: int) -> ir.Value | None:
        return self._inputs[index] if index < len(self._inputs) else None

    def has(self, index: int) -> bool:
        return self.optional(index) is not None

    def x(self, index: int) -> ir.Value:
        value = self.optional(index)
        assert value is not None
        return value

    def y(self, index: int = 0, dtype: ir.DataType | None = None) -> ir.Value:
        return self._outputs[index]

    def has_dy(self, index: int = 0) -> bool:
        return self._gradients[index] is not None

    def dy(self, index: int = 0) -> ir.Value:
        gradient = self._gradients[index]
        return self.zeros_like(self.y(index)) if gradient is None else gradient

    def wants(self, index: int) -> bool:
        place = self._places[index]
        return place is not None and self.reads(place)


Replacement = Callable[[PeerNode], Results]

_REPLACEMENTS: dict[str, Replacement] = {}


def replaces(*op_types: str) -> Callable[[Replacement], Replacement]:
    """Register the decorated function as the replacement of `op_types`."""

    def register(function: Replacement) -> Replacement:
        for op_type in op_types:
            assert op_type not in _REPLACEMENTS, op_type
            _REPLACEMENTS[op_type] = function
        return function

    return register


def replaced_operators() -> list[str]:
    """The operators that have a replacement."""
    return sorted(_REPLACEMENTS)


def replace_peer_operators(model: ir.Model) -> None:
    """Replace the operators that only onnxruntime-training has, in place.

    model: of opset 18 or newer, sorted, with types and shapes as far as they are known.

    Our own operators in it need their bodies: `ort_ops.operators.embed_functions`, once it is a message.

    Raises:
        ValueError: operators without a replacement (all of them are listed), or a node whose replacement
            needs to know more about it. The model is then unfinished.
    """
    graph = model.graph
    missing = [
        node for node in graph.all_nodes() if _is_peer_node(node) and node.op_type not in _REPLACEMENTS
    ]
    if missing:
        raise ValueError(
            f"{len(missing)} node{'s' if len(missing) > 1 else ''} of onnxruntime-training cannot be written "
            f"in standard operators: {', '.join(describe(node) for node in missing)}."
        )
    emit = Emitter(NameScope(_names(graph)), model.opset_imports[""])
    # Backwards, so that what a gradient reads of its forward node and no longer needs is not asked of that
    # one.
    for node in reversed(list(graph)):
        if _is_peer_node(node):
            _replace(graph, node, emit)
    for constant in emit.constants:
        graph.register_initializer(constant)
    model.opset_imports.update(emit.domains)
    graph.sort()
    RemoveUnusedNodesPass()(model)


def _is_peer_node(node: ir.Node) -> bool:
    if node.domain == "":
        return node.op_type in ("MaxPoolGrad", "AveragePoolGrad")
    known = node.op_type in _REPLACEMENTS or node.op_type in WITHOUT_REPLACEMENT
    return node.domain == PEER_DOMAIN and (known or node.op_type.endswith("Grad"))


def _replace(graph: ir.Graph, node: ir.Node, emit: Emitter) -> None:
    emit.prefix = node.name or node.op_type
    first = len(emit.nodes)
    c = PeerNode(node, emit, emit.opset)
    results = _REPLACEMENTS[node.op_type](c)
    old = [value for index, value in enumerate(node.outputs) if c.reads(index)]
    new: list[ir.Value] = []
    for index, value in enumerate(results):
        if not c.reads(index):
            continue
        assert value is not None, f"{node.op_type}: output {index} is read"
        if value in new or value.producer() not in emit.nodes[first:]:
            value = emit.fresh_copy(value)
        new.append(value)
    for before, after in zip(old, new, strict=True):
        after.name = before.name
        after.type, after.shape = before.type or after.type, before.shape
    ir.convenience.replace_nodes_and_values(graph, node, [node], emit.nodes[first:], old, new)


def _names(graph: ir.Graph) -> set[str]:
    names = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    for node in graph.all_nodes():
        names.update([str(node.name), *(str(value.name) for value in node.outputs)])
    return names


# -- activations ---------------------------------------------------------------------------------------------


@replaces("ReluGrad")
def relu_grad(c: PeerNode) -> Results:
    """(dY, X or Y)."""
    return (c.op("Where", c.op("Greater", c.x(1), 0.0), c.x(0), 0.0),)


@replaces("LeakyReluGrad")
def leaky_relu_grad(c: PeerNode) -> Results:
    """(dY, Y)."""
    slope = c.op("Mul", c.x(0), c.float_attr("alpha", 0.01))
    return (c.op("Where", c.op("Greater", c.x(1), 0.0), c.x(0), slope),)


@replaces("TanhGrad")
def tanh_grad(c: PeerNode) -> Results:
    """(dY, Y)."""
    return (c.op("Mul", c.x(0), c.op("Sub", 1.0, c.op("Mul", c.x(1), c.x(1)))),)


@replaces("SigmoidGrad")
def sigmoid_grad(c: PeerNode) -> Results:
    """(dY, Y)."""
    return (c.op("Mul", c.x(0), c.op("Mul", c.x(1), c.op("Sub", 1.0, c.x(1)))),)


@replaces("GeluGrad")
def gelu_grad(c: PeerNode) -> Results:
    return (_gelu_gradient(c, c.x(1), "none"),)


@replaces("BiasGeluGrad_dX")
def bias_gelu_grad(c: PeerNode) -> Results:
    """(dY, X, bias); the bias's gradient is a sum of this one, by other nodes."""
    return (_gelu_gradient(c, c.op("Add", c.x(1), c.x(2)), "none"),)


@replaces("FastGeluGrad")
def fast_gelu_grad(c: PeerNode) -> Results:
    return (_gelu_gradient(c, c.x(1), "tanh"),)


@replaces("BiasFastGeluGrad_dX")
def bias_fast_gelu_grad(c: PeerNode) -> Results:
    return (_gelu_gradient(c, c.op("Add", c.x(1), c.x(2)), "tanh"),)


def _gelu_gradient(c: PeerNode, x: ir.Value, approximate: str) -> ir.Value:
    operator = operators.GELU_GRAD
    return c.op(
        operator.name, c.x(0), x, domain=operator.domain, version=operator.version, approximate=approximate
    )


@replaces("QuickGeluGrad")
def quick_gelu_grad(c: PeerNode) -> Results:
    return (c.op("Mul", c.x(0), sigmoid_gate_slope(c, c.x(1), c.float_attr("alpha", 1.702))),)


@replaces("SoftmaxGrad", "SoftmaxGrad_13")
def softmax_grad(c: PeerNode) -> Results:
    """(dY, Y): Y * (dY - sum(dY * Y))."""
    dy, y = c.x(0), c.x(1)
    total = c.op("ReduceSum", c.op("Mul", dy, y), _softmax_axes(c), keepdims=1)
    return (c.op("Mul", c.op("Sub", dy, total), y),)


@replaces("LogSoftmaxGrad", "LogSoftmaxGrad_13")
def log_softmax_grad(c: PeerNode) -> Results:
    """(dY, Y): dY - exp(Y) * sum(dY)."""
    dy, y = c.x(0), c.x(1)
    total = c.op("ReduceSum", dy, _softmax_axes(c), keepdims=1)
    return (c.op("Sub", dy, c.op("Mul", c.op("Exp", y), total)),)


def _softmax_axes(c: PeerNode) -> list[int]:
    """The axes of one distribution: `axis`, or all from there on in the form before opset 13."""
    if c.node.op_type.endswith("_13"):
        return [c.int_attr("axis", -1)]
    rank = c.rank(c.x(1))
    return list(range(c.int_attr("axis", 1) % rank, rank))


@replaces("DropoutGrad")
def dropout_grad(c: PeerNode) -> Results:
    """(dY, mask, ratio, training mode): dY * mask / (1 - ratio); the kernel does not look at the mode."""
    dy = c.x(0)
    mask = c.node.inputs[1]
    if c.has(2):
        dy = c.op("Div", dy, c.op("Sub", 1.0, c.cast(c.x(2), dy.dtype)))
    else:
        dy = c.op("Mul", dy, 2.0)
    return (c.op("Where", mask, dy, 0.0),)


# -- losses --------------------------------------------------------------------------------------------------


@replaces("SoftmaxCrossEntropyLossGrad")
def softmax_cross_entropy_loss_grad(c: PeerNode) -> Results:
    """(d loss, log probabilities, labels, weight): (softmax - onehot) * g, g being each label's share.

    Without ignore_index, labels of -1 are ignored, as by that runtime's loss.
    """
    dloss, log_prob, labels = c.x(0), c.x(1), c.op("Unsqueeze", c.node.inputs[2], [1])
    ignored = c.op("Equal", labels, c.int_attr("ignore_index", -1))
    labels = c.op("Where", ignored, 0, labels)
    if c.has(3):
        weight = c.op("Gather", c.x(3), labels, axis=0)
    else:
        weight = c.op("Expand", c.emit.scalar(1.0, c.dtype), c.op("Shape", labels))
    weight = c.op("Where", ignored, 0.0, weight)
    reduction = c.str_attr("reduction", "mean")
    if reduction == "none":
        dloss = c.op("Unsqueeze", dloss, [1])
    elif reduction == "mean":
        size = c.op("ReduceSum", weight, keepdims=0)
        dloss = c.op("Div", dloss, c.op("Where", c.op("Equal", size, 0.0), 1.0, size))
    share = c.op("Mul", weight, dloss)
    spread = c.op("Mul", c.op("Exp", log_prob), share)
    return (c.op("ScatterElements", spread, labels, c.op("Neg", share), axis=1, reduction="add"),)


@replaces("SoftmaxCrossEntropyGrad")
def softmax_cross_entropy_grad(c: PeerNode) -> Results:
    """(d loss, log probabilities, labels as distributions), the classes on the last axis."""
    dloss, log_prob, labels = c.x(0), c.x(1), c.x(2)
    if c.str_attr("reduction", "mean") == "mean":
        rows = c.op("ReduceProd", c.op("Shape", log_prob, end=-1), keepdims=0)
        dloss = c.op("Div", dloss, c.cast(rows, dloss.dtype))
    return (c.op("Mul", c.op("Sub", c.op("Exp", log_prob), labels), dloss),)


# -- elements moved about ------------------------------------------------------------------------------------


@replaces("ConcatTraining")
def concat_training(c: PeerNode) -> Results:
    """The joined tensor, and the size of each part on the axis."""
    axis = c.int_attr("axis", 0)
    parts = [c.x(index) for index in range(len(c.node.inputs))]
    sizes = None
    if c.reads(1):
        sizes = c.op("Concat", *(c.op("Gather", c.shape(part), [axis], axis=0) for part in parts), axis=0)
    return c.op("Concat", *parts, axis=axis), sizes


@replaces("SplitTraining")
def split_training(c: PeerNode) -> Results:
    return c.multi("Split", c.x(0), c.sizes(1), outputs=len(c.node.outputs), axis=c.int_attr("axis", 0))


@replaces("GatherGrad")
def gather_grad(c: PeerNode) -> Results:
    """(shape, indices, dY): one scatter-add."""
    shape, indices, dy = c.sizes(0), c.sizes(1), c.x(2)
    rank = _length(c, shape)
    axis = c.int_attr("axis", 0) % rank
    flat = c.op("Reshape", indices, [-1])
    parts = [c.op("Slice", shape, [0], [axis], [0])] if axis else []
    parts.append(c.op("Shape", flat))
    if axis < rank - 1:
        parts.append(c.op("Slice", shape, [axis + 1], [rank], [0]))
    sizes = c.op("Concat", *parts, axis=0)
    updates = c.op("Reshape", dy, sizes, allowzero=1)
    places = flat
    if rank > 1:
        places = c.op("Unsqueeze", flat, [place for place in range(rank) if place != axis])
        places = c.op("Expand", places, sizes)
    return (c.op("ScatterElements", c.zeros(shape), places, updates, axis=axis, reduction="add"),)


def _length(c: PeerNode, sizes: ir.Value) -> int:
    """The number of elements of a shape, which is the rank of what has it."""
    if sizes.const_value is not None:
        return int(sizes.const_value.size)
    if sizes.shape is not None and isinstance(sizes.shape[0], int):
        return int(sizes.shape[0])
    producer = sizes.producer()
    if producer is not None and producer.op_type == "Shape" and producer.inputs[0] is not None:
        return c.rank(producer.inputs[0])
    return c.rank(c.node.outputs[0])


@replaces("GatherElementsGrad")
def gather_elements_grad(c: PeerNode) -> Results:
    """(dY, shape, indices)."""
    axis = c.int_attr("axis", 0)
    return (c.op("ScatterElements", c.zeros(c.sizes(1)), c.sizes(2), c.x(0), axis=axis, reduction="add"),)


@replaces("GatherNDGrad")
def gather_nd_grad(c: PeerNode) -> Results:
    """(shape, indices, dY)."""
    shape = c.sizes(0)
    places = c.op("GatherND", _numbered(c, shape), c.sizes(1), batch_dims=c.int_attr("batch_dims", 0))
    return (_scattered(c, shape, places, c.x(2)),)


@replaces("SliceGrad")
def slice_grad(c: PeerNode) -> Results:
    """(dY, shape, starts, ends, axes, steps)."""
    shape = c.sizes(1)
    places = c.op("Slice", _numbered(c, shape), *c.node.inputs[2:])
    return (_scattered(c, shape, places, c.x(0)),)


def _numbered(c: PeerNode, shape: ir.Value) -> ir.Value:
    """A tensor of this shape whose elements are numbered: what picks from it says where it picked."""
    count = c.op("ReduceProd", shape, keepdims=0)
    numbers = c.op("Range", c.emit.constant(np.array(0)), count, c.emit.constant(np.array(1)))
    return c.op("Reshape", numbers, shape, allowzero=1)


def _scattered(c: PeerNode, shape: ir.Value, places: ir.Value, updates: ir.Value) -> ir.Value:
    """Zeros of this shape with each update added to the element of its number."""
    zeros = c.zeros(c.op("ReduceProd", shape, keepdims=1))
    flat = [c.op("Reshape", value, [-1]) for value in (places, updates)]
    return c.op("Reshape", c.op("ScatterElements", zeros, *flat, axis=0, reduction="add"), shape, allowzero=1)


# -- arithmetic ----------------------------------------------------------------------------------------------


@replaces("BroadcastGradientArgs")
def broadcast_gradient_args(c: PeerNode) -> Results:
    """(shape of a, shape of b): the axes along which each was broadcast."""
    return _broadcast_axes(c, c.sizes(0), c.sizes(1))


def _broadcast_axes(c: PeerNode, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    lengths = [c.op("Shape", a), c.op("Shape", b)]
    rank = c.op("Max", *lengths)
    padded = [
        c.op("Concat", c.op("Expand", [1], c.op("Sub", rank, length)), sizes, axis=0)
        for sizes, length in zip((a, b), lengths, strict=True)
    ]
    joined = c.op("Where", c.op("Equal", padded[0], 1), padded[1], padded[0])
    axes = [c.op("NonZero", c.op("Not", c.op("Equal", sizes, joined))) for sizes in padded]
    return c.op("Reshape", axes[0], [-1]), c.op("Reshape", axes[1], [-1])


@replaces("DivGrad")
def div_grad(c: PeerNode) -> Results:
    """(dY, A, B): dY / B and -dY * A / B^2, summed over the axes that were broadcast."""
    dy, a, b = c.x(0), c.x(1), c.x(2)
    da = c.op("Div", dy, b)
    db = c.op("Neg", c.op("Div", c.op("Mul", da, a), b))
    if c.static_shape(a) is not None and c.static_shape(a) == c.static_shape(b):
        return da, db
    sizes = c.op("Shape", a), c.op("Shape", b)
    summed = []
    for gradient, axes, shape in zip((da, db), _broadcast_axes(c, *sizes), sizes, strict=True):
        total = c.op("ReduceSum", gradient, axes, keepdims=1, noop_with_empty_axes=1)
        summed.append(c.op("Reshape", total, shape, allowzero=1))
    return summed


@replaces("ReduceSumTraining")
def reduce_sum_training(c: PeerNode) -> Results:
    return (
        c.op(
            "ReduceSum",
            c.x(0),
            c.sizes(1),
            keepdims=c.int_attr("keepdims", 1),
            noop_with_empty_axes=c.int_attr("noop_with_empty_axes", 0),
        ),
    )


@replaces("Scale")
def scale(c: PeerNode) -> Results:
    """X times, or with scale_down divided by, a scalar of any type."""
    x = c.x(0)
    return (c.op("Div" if c.int_attr("scale_down", 0) else "Mul", x, c.cast(c.x(1), x.dtype)),)


@replaces("ScaledSum")
def scaled_sum(c: PeerNode) -> Results:
    """The sum of the inputs, each times its attribute scale_<index>."""
    terms = [
        c.op("Mul", c.x(index), c.float_attr(f"scale_{index}", 1.0)) for index in range(len(c.node.inputs))
    ]
    return (c.op("Sum", *terms),)


@replaces("ReduceAllL2")
def reduce_all_l2(c: PeerNode) -> Results:
    """The L2 norm of all inputs together."""
    squares = [c.op("ReduceSumSquare", c.x(index), keepdims=0) for index in range(len(c.node.inputs))]
    return (c.op("Sqrt", c.op("Sum", *squares)),)


@replaces("FakeQuant")
def fake_quant(c: PeerNode) -> Results:
    """(X, scale, zero point), the latter two scalars in float: X rounded as if quantized, and where the
    number was in range."""
    x, scale, zero = c.x(0), c.x(1), c.x(2)
    lowest, highest = float(c.int_attr("quant_min", 0)), float(c.int_attr("quant_max", 255))
    number = c.op("Add", c.op("Round", c.op("Div", x, scale)), zero)
    inside = c.op("And", c.op("GreaterOrEqual", number, lowest), c.op("LessOrEqual", number, highest))
    clipped = c.op("Max", c.op("Min", number, highest), lowest)
    return c.op("Mul", c.op("Sub", clipped, zero), scale), inside


@replaces("FakeQuantGrad")
def fake_quant_grad(c: PeerNode) -> Results:
    """(dY, mask)."""
    return (c.op("Where", c.node.inputs[1], c.x(0), 0.0),)


# -- normalisations ------------------------------------------------------------------------------------------


@replaces("LayerNormalizationGrad")
def layer_normalization_grad(c: PeerNode) -> Results:
    """(dY, X, scale, mean, 1 / deviation), where AddLayerNormGrad cannot be used: for float64, say."""
    x, mean, rstd = c.x(1), c.cast(c.x(3), c.x(1).dtype), c.cast(c.x(4), c.x(1).dtype)
    return _norm_gradients(c, c.op("Mul", c.op("Sub", x, mean), rstd), c.x(2), rstd)


@replaces("InvertibleLayerNormalizationGrad")
def invertible_layer_normalization_grad(c: PeerNode) -> Results:
    """(dY, Y, scale, bias, 1 / deviation): the normalised input follows from the output."""
    rstd = c.cast(c.x(4), c.x(1).dtype)
    xhat = c.op("Div", c.op("Sub", c.x(1), c.x(3)), c.x(2))
    return _norm_gradients(c, xhat, c.x(2), rstd)


@replaces("SimplifiedLayerNormalizationGrad")
def simplified_layer_normalization_grad(c: PeerNode) -> Results:
    """(dY, X, scale, 1 / root of the mean square)."""
    rstd = c.cast(c.x(3), c.x(1).dtype)
    return _norm_gradients(c, c.op("Mul", c.x(1), rstd), c.x(2), rstd, centred=False)[:2]


def _norm_gradients(
    c: PeerNode, xhat: ir.Value, gamma: ir.Value, rstd: ir.Value, centred: bool = True
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dY * gamma, the mean of g only if `centred`;
    d gamma and d beta."""
    dy, rank = c.x(0), c.rank(c.x(1))
    first = c.int_attr("axis", -1) % rank
    axes, rows = list(range(first, rank)), list(range(first))
    g = c.op("Mul", dy, gamma)
    along = c.op("Mul", xhat, c.op("ReduceMean", c.op("Mul", g, xhat), axes, keepdims=1))
    rest = c.op("Sub", g, along)
    if centred:
        rest = c.op("Sub", rest, c.op("ReduceMean", g, axes, keepdims=1))
    terms = [c.op("Mul", dy, xhat), dy]
    dgamma, dbeta = (c.op("ReduceSum", term, rows, keepdims=0) if rows else term for term in terms)
    return c.op("Mul", rest, rstd), c.like(dgamma, gamma), c.like(dbeta, gamma)


@replaces("BatchNormInternal")
def batch_norm_internal(c: PeerNode) -> Results:
    """Y, the new running mean and variance, and the batch's mean and 1 / deviation."""
    x = c.x(0)
    y, mean, variance = c.multi(
        "BatchNormalization", x, *(c.x(index) for index in range(1, 5)), outputs=3, training_mode=1,
        epsilon=c.float_attr("epsilon", 1e-5), momentum=c.float_attr("momentum", 0.9),
    )  # fmt: skip
    axes = [axis for axis in range(c.rank(x)) if axis != 1]
    batch_mean = c.op("ReduceMean", x, axes, keepdims=1)
    centred = c.op("Sub", x, batch_mean)
    batch_variance = c.op("ReduceMean", c.op("Mul", centred, centred), axes, keepdims=0)
    deviation = c.op("Sqrt", c.op("Add", batch_variance, c.float_attr("epsilon", 1e-5)))
    return y, mean, variance, c.op("Squeeze", batch_mean, axes), c.op("Reciprocal", deviation)


@replaces("BatchNormalizationGrad")
def batch_normalization_grad(c: PeerNode) -> Results:
    """(dY, X, scale, mean, 1 / deviation), all but the first two of one axis, the channels."""
    dy, x = c.x(0), c.x(1)
    rank = c.rank(x)
    rest = list(range(2, rank))
    scale, mean, rstd = (c.op("Unsqueeze", c.x(index), [0, *rest]) for index in (2, 3, 4))
    axes = [0, *rest]
    xhat = c.op("Mul", c.op("Sub", x, mean), rstd)
    dy_xhat = c.op("Mul", dy, xhat)
    mean_dy = c.op("ReduceMean", dy, axes, keepdims=1)
    along = c.op("Mul", xhat, c.op("ReduceMean", dy_xhat, axes, keepdims=1))
    dx = c.op("Mul", c.op("Sub", c.op("Sub", dy, mean_dy), along), c.op("Mul", scale, rstd))
    return dx, c.op("ReduceSum", dy_xhat, axes, keepdims=0), c.op("ReduceSum", dy, axes, keepdims=0)


# -- convolutions and pools ----------------------------------------------------------------------------------


@replaces("ConvGrad")
def conv_grad(c: PeerNode) -> Results:
    """(dY, X, W); dY has the shape of Y."""
    return _in_three(conv(_Replayed(c, [c.x(1), c.x(2)], [c.x(0)], [c.x(0)])))


@replaces("ConvTransposeGrad")
def conv_transpose_grad(c: PeerNode) -> Results:
    return _in_three(conv_transpose(_Replayed(c, [c.x(1), c.x(2)], [c.x(0)], [c.x(0)])))


def _in_three(results: Results) -> Results:
    return [*results, *[None] * (3 - len(results))]


@replaces("MaxPoolGrad")
def max_pool_grad(c: PeerNode) -> Results:
    """(dY, places); X is what the node read that made the places."""
    places = c.sizes(1)
    forward = _forward_of(c, places, "MaxPool")
    return max_pool(_Replayed(c, [forward.inputs[0]], [c.x(0), places], [c.x(0)]))


@replaces("AveragePoolGrad")
def average_pool_grad(c: PeerNode) -> Results:
    """(dY); only the name tells the forward node, whose input has the shape of the result."""
    forward_name = (c.node.name or "").rsplit("_Grad/", 1)[0]
    graph = c.node.graph
    assert graph is not None
    candidates = [node for node in graph if node.op_type == "AveragePool" and node.name == forward_name]
    source = candidates[0].inputs[0] if len(candidates) == 1 else c.node.outputs[0]
    assert source is not None
    if len(candidates) != 1 and c.static_shape(source) is None:
        raise c.fail(
            f"the graph must have one AveragePool of the name {forward_name!r}, or {source.name!r} a known "
            "shape"
        )
    return average_pool(_Replayed(c, [source], [c.x(0)], [c.x(0)]))


# -- recurrent networks --------------------------------------------------------------------------------------


@replaces("LSTMTraining")
def lstm_training(c: PeerNode) -> Results:
    """Y, Y_h, Y_c, and the cells and gates of all steps, which the gradient's rule works out again."""
    return (*_recurrent(c, "LSTM", 3), None, None)


@replaces("GRUTraining")
def gru_training(c: PeerNode) -> Results:
    """Y, Y_h, and the gates of all steps."""
    return (*_recurrent(c, "GRU", 2), None)


def _recurrent(c: PeerNode, op_type: str, outputs: int) -> Sequence[ir.Value]:
    attributes = {name: attribute.value for name, attribute in c.node.attributes.items()}
    return c.multi(op_type, c.x(0), *c.node.inputs[1:], outputs=outputs, **attributes)


@replaces("LSTMGrad")
def lstm_grad(c: PeerNode) -> Results:
    """(X, W, R, lengths, H_0, C_0, Y, cells, gates, dY, dY_h, dY_c): gradients of X, W, R, B, H_0, C_0, P."""
    forward = _forward_of(c, c.x(6), "LSTMTraining")
    gradients = [c.optional(index) for index in (9, 10, 11)]
    places = (0, 1, 2, 3, None, 4, 5, 6)
    results = lstm(_Replayed(c, forward.inputs, forward.outputs, gradients, places))
    return [results[index] for index, place in enumerate(places) if place is not None]


@replaces("GRUGrad")
def gru_grad(c: PeerNode) -> Results:
    """(X, W, R, B, lengths, H_0, Y, gates, dY, dY_h): gradients of X, W, R, B, H_0."""
    forward = _forward_of(c, c.x(6), "GRUTraining")
    gradients = [c.optional(index) for index in (8, 9)]
    places = (0, 1, 2, 3, None, 4)
    results = gru(_Replayed(c, forward.inputs, forward.outputs, gradients, places))
    return [results[index] for index, place in enumerate(places) if place is not None]


def _forward_of(c: PeerNode, value: ir.Value, op_type: str) -> ir.Node:
    producer = value.producer()
    if producer is None or producer.op_type != op_type:
        raise c.fail(f"{value.name!r} must be made by the node that this is the gradient of, a {op_type}")
    return producer
