"""A pre-norm GPT written directly as an ONNX graph.

`build_loss_model` gives the forward model to train (tokens and targets -> loss), `build_text_model` the one
to use (text -> logits of the next character); both share the same trunk and the same parameter names.
The residual stream is a matrix [tokens, width] so that every linear layer is one `Gemm` with its bias, and
each `LayerNormalization` reads a residual `Add`, which is the pair that AddLayerNormGrad differentiates in
one pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

OPSET = 20
IR_VERSION = 10


@dataclass(frozen=True)
class GptConfig:
    """Sizes of the model. `width` must be a multiple of `heads`; a block is 4 * width wide inside."""

    vocabulary: int
    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 4

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"GptConfig: width must be a multiple of heads; got {self.width} and {self.heads} heads."
            )


def parameter_shapes(config: GptConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every trained tensor, in forward order. Weights are [inputs, outputs]."""
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding": (config.vocabulary, width),
        "position_embedding": (config.context, width),
    }
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        shapes |= _norm_shapes(f"{block}.attention_norm", width)
        shapes |= _linear_shapes(f"{block}.attention.query_key_value", width, 3 * width)
        shapes |= _linear_shapes(f"{block}.attention.projection", width, width)
        shapes |= _norm_shapes(f"{block}.mlp_norm", width)
        shapes |= _linear_shapes(f"{block}.mlp.expansion", width, 4 * width)
        shapes |= _linear_shapes(f"{block}.mlp.projection", 4 * width, width)
    shapes |= _norm_shapes("final_norm", width)
    shapes |= _linear_shapes("head", width, config.vocabulary)
    return shapes


def _norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear_shapes(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def initial_parameters(config: GptConfig, seed: int) -> dict[str, np.ndarray]:
    """Random float32 parameters as in GPT-2: normal with deviation 0.02, smaller for the projections that
    write to the residual stream (so that its variance does not grow with depth), ones for norms, zeros for
    biases.
    """
    generator = np.random.default_rng(seed)
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith(".bias"):
            values = np.zeros(shape)
        elif name.endswith("norm.weight"):
            values = np.ones(shape)
        else:
            deviation = 0.02 / math.sqrt(2 * config.layers) if ".projection." in name else 0.02
            values = generator.normal(0.0, deviation, shape)
        parameters[name] = values.astype(np.float32)
    return parameters


def build_loss_model(
    config: GptConfig, parameters: Mapping[str, np.ndarray], batch: int | str = "batch"
) -> onnx.ModelProto:
    """The forward model: `tokens` and `targets`, both int64 [batch, context], to the scalar `loss`, the mean
    cross entropy in nats per token. `parameters` become its initializers.
    """
    builder, values = _new_graph("gpt_loss", parameters)
    op = builder.op
    tokens = builder.input("tokens", ir.DataType.INT64, [batch, config.context])
    targets = builder.input("targets", ir.DataType.INT64, [batch, config.context])
    logits = _logits(
        op,
        config,
        values,
        tokens,
        positions=values["position_embedding"],
        mask=op.initializer(ir.tensor(_causal_mask(config.context)), "causal_mask"),
        grid=(-1, config.context),
    )
    loss = op.SoftmaxCrossEntropyLoss(logits, op.Reshape(targets, [-1]), reduction="mean")
    _add_output(builder, loss, "loss", ir.DataType.FLOAT, [])
    return _to_model(builder)


def build_text_model(
    config: GptConfig, parameters: Mapping[str, np.ndarray], alphabet: Sequence[str]
) -> onnx.ModelProto:
    """The model to use: `text`, string [1] and not empty, to `logits`, float [vocabulary], of the character
    that follows it. It runs in plain ONNX Runtime: the text is split and its characters are looked up inside.

    Entry i of `alphabet` is the character of token i; it is kept in the model's metadata as `alphabet`.
    Only the last `context` characters of the text count; a character outside the alphabet is read as a space.
    """
    builder, values = _new_graph("gpt_text", parameters)
    op = builder.op
    text = builder.input("text", ir.DataType.STRING, [1])
    # `separators` with one empty string is this operator's way to say "one token per character".
    characters = op.Tokenizer(
        text, _domain="com.microsoft", _version=1, mark=0, mincharnum=1, pad_value="", separators=[""]
    )
    tokens = op.LabelEncoder(
        characters,
        _domain="ai.onnx.ml",
        _version=4,
        keys_strings=list(alphabet),
        values_int64s=list(range(len(alphabet))),
        default_int64=list(alphabet).index(" "),
    )
    tokens = op.Slice(tokens, [-config.context], [np.iinfo(np.int64).max], [1])
    length = op.Shape(tokens, start=1, end=2)
    mask = op.initializer(ir.tensor(_causal_mask(config.context)), "causal_mask")
    logits = _logits(
        op,
        config,
        values,
        tokens,
        positions=op.Slice(values["position_embedding"], [0], length, [0]),
        mask=op.Slice(mask, [0, 0], op.Concat(length, length, axis=0), [0, 1]),
        grid=(1, -1),
    )
    last = op.Gather(logits, -1, axis=0)
    _add_output(builder, last, "logits", ir.DataType.FLOAT, [config.vocabulary])
    model = _to_model(builder)
    onnx.helper.set_model_props(model, {"alphabet": "".join(alphabet)})
    return model


def _logits(
    op: OpBuilder,
    config: GptConfig,
    parameters: Mapping[str, ir.Value],
    tokens: ir.Value,
    positions: ir.Value,
    mask: ir.Value,
    grid: tuple[int, int],
) -> ir.Value:
    """Logits [batch * length, vocabulary] of `tokens` [batch, length].

    `positions` is [length, width], `mask` [length, length]; `grid` is (batch, length) where one may be -1.
    """
    embedded = op.Add(op.Gather(parameters["token_embedding"], tokens), positions)
    stream = op.Reshape(embedded, [-1, config.width])
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        normed = _layer_norm(op, parameters, f"{block}.attention_norm", stream)
        stream = op.Add(stream, _attention(op, config, parameters, f"{block}.attention", normed, mask, grid))
        normed = _layer_norm(op, parameters, f"{block}.mlp_norm", stream)
        stream = op.Add(stream, _mlp(op, parameters, f"{block}.mlp", normed))
    return _linear(op, parameters, "head", _layer_norm(op, parameters, "final_norm", stream))


def _attention(
    op: OpBuilder,
    config: GptConfig,
    parameters: Mapping[str, ir.Value],
    name: str,
    x: ir.Value,
    mask: ir.Value,
    grid: tuple[int, int],
) -> ir.Value:
    head_width = config.width // config.heads
    joined = _linear(op, parameters, f"{name}.query_key_value", x)

    def heads(part: ir.Value, order: Sequence[int]) -> ir.Value:
        return op.Transpose(op.Reshape(part, [*grid, config.heads, head_width]), perm=order)

    query, key, value = op.Split(joined, num_outputs=3, axis=1, _outputs=3)
    scores = op.MatMul(heads(query, [0, 2, 1, 3]), heads(key, [0, 2, 3, 1]))
    scores = op.Mul(scores, 1.0 / math.sqrt(head_width))
    attended = op.MatMul(op.Softmax(op.Add(scores, mask), axis=-1), heads(value, [0, 2, 1, 3]))
    joined = op.Reshape(op.Transpose(attended, perm=[0, 2, 1, 3]), [-1, config.width])
    return _linear(op, parameters, f"{name}.projection", joined)


def _mlp(op: OpBuilder, parameters: Mapping[str, ir.Value], name: str, x: ir.Value) -> ir.Value:
    hidden = op.Gelu(_linear(op, parameters, f"{name}.expansion", x), approximate="tanh")
    return _linear(op, parameters, f"{name}.projection", hidden)


def _linear(op: OpBuilder, parameters: Mapping[str, ir.Value], name: str, x: ir.Value) -> ir.Value:
    return op.Gemm(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])


def _layer_norm(op: OpBuilder, parameters: Mapping[str, ir.Value], name: str, x: ir.Value) -> ir.Value:
    return op.LayerNormalization(
        x, parameters[f"{name}.weight"], parameters[f"{name}.bias"], axis=-1, epsilon=1e-5
    )


def _causal_mask(length: int) -> np.ndarray:
    """Zero where a position may look (itself and before), -inf above the diagonal."""
    return np.triu(np.full((length, length), -np.inf, np.float32), k=1)


def _new_graph(name: str, parameters: Mapping[str, np.ndarray]) -> tuple[GraphBuilder, dict[str, ir.Value]]:
    graph = ir.Graph(name=name, inputs=[], outputs=[], nodes=[], opset_imports={"": OPSET})
    builder = GraphBuilder(graph)
    values = {key: builder.initializer(ir.tensor(array), key) for key, array in parameters.items()}
    return builder, values


def _add_output(
    builder: GraphBuilder, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int]
) -> None:
    value.dtype = dtype
    value.shape = ir.Shape(shape)
    builder.add_output(value, name)


def _to_model(builder: GraphBuilder) -> onnx.ModelProto:
    for node in builder.graph:
        builder.graph.opset_imports.setdefault(node.domain, node.version)
    return ir.to_proto(ir.Model(builder.graph, ir_version=IR_VERSION, producer_name="ort_ops"))
