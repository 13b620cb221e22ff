"""A BERT sentence encoder written directly as ONNX graphs, with the parameter names of the published weights.

`build_embedding_model` gives the model to use (tokens -> unit vectors), `build_contrastive_model` the one to
train (pairs of texts -> loss); both share the same trunk and parameters. As in the GPT of this folder, hidden
states are a matrix [tokens, width], so that every linear layer is one `Gemm`.

Source: Devlin et al. 2019 (the encoder), Reimers & Gurevych 2019 (mean pooling), Henderson et al. 2017 (every
other passage of a batch is a wrong answer).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

OPSET = 20
IR_VERSION = 10

# Added to the scores of padding. Finite, so that a text of nothing but padding still gives finite numbers.
_MASKED = -1e9
# Cosines lie within -1..1: without a factor the softmax over a batch could not get sharp. 20 is what
# all-MiniLM-L6-v2 was trained with.
_SIMILARITY_SCALE = 20.0


@dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder, by the names of the published configuration file."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12


def parameter_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in forward order. Weights of linear layers are [outputs, inputs]."""
    width, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, width),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, width),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, width),
        **_norm_shapes("embeddings.LayerNorm", width),
    }
    for layer in range(config.num_hidden_layers):
        block = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            shapes |= _linear_shapes(f"{block}.attention.self.{name}", width, width)
        shapes |= _linear_shapes(f"{block}.attention.output.dense", width, width)
        shapes |= _norm_shapes(f"{block}.attention.output.LayerNorm", width)
        shapes |= _linear_shapes(f"{block}.intermediate.dense", width, inner)
        shapes |= _linear_shapes(f"{block}.output.dense", inner, width)
        shapes |= _norm_shapes(f"{block}.output.LayerNorm", width)
    return shapes


def _norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear_shapes(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def build_embedding_model(config: BertConfig, parameters: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model to use: `input_ids` and `attention_mask` (1 for a token, 0 for padding), both int64 [batch,
    length], to `embeddings`, float [batch, hidden_size], each of length 1.
    """
    builder, values = _new_graph("sentence_embeddings", config, parameters)
    embeddings = _embed(builder, config, values, "")
    _add_output(builder, embeddings, "embeddings", ["batch", config.hidden_size])
    return _to_model(builder)


def build_contrastive_model(config: BertConfig, parameters: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """The model to train: `title_input_ids`, `title_attention_mask` [batch, title_length] and
    `passage_input_ids`, `passage_attention_mask` [batch, passage_length], all int64, to the scalar `loss`.

    Row i of both sides belongs together; `similarities`, float [batch, batch], is 20 times the cosine of
    every title and passage, and the loss is the mean cross entropy of finding the passage by the title and
    the title by the passage. Rows with the same title are no wrong answers to each other.
    """
    builder, values = _new_graph("sentence_pairs", config, parameters)
    op = builder.op
    titles = _embed(builder, config, values, "title_")
    passages = _embed(builder, config, values, "passage_")
    similarities = op.Mul(op.MatMul(titles, op.Transpose(passages, perm=[1, 0])), _SIMILARITY_SCALE)
    pairs = op.Range(0, op.Squeeze(op.Shape(similarities, start=0, end=1)), 1)
    answers = op.Add(similarities, _same_title_mask(op, builder.graph.inputs[0], pairs))
    by_title = op.SoftmaxCrossEntropyLoss(answers, pairs, reduction="mean")
    by_passage = op.SoftmaxCrossEntropyLoss(op.Transpose(answers, perm=[1, 0]), pairs, reduction="mean")
    _add_output(builder, op.Mul(op.Add(by_title, by_passage), 0.5), "loss", [])
    _add_output(builder, similarities, "similarities", ["batch", "batch"])
    return _to_model(builder)


def _same_title_mask(op: OpBuilder, title_tokens: ir.Value, pairs: ir.Value) -> ir.Value:
    """[batch, batch]: `_MASKED` where two different rows have the same title, else 0."""
    equal_tokens = op.Equal(op.Unsqueeze(title_tokens, [1]), op.Unsqueeze(title_tokens, [0]))
    equal_titles = op.ReduceMin(op.Cast(equal_tokens, to=ir.DataType.FLOAT), [2], keepdims=0)
    other_row = op.Not(op.Equal(op.Unsqueeze(pairs, [1]), op.Unsqueeze(pairs, [0])))
    return op.Mul(op.Mul(equal_titles, op.Cast(other_row, to=ir.DataType.FLOAT)), _MASKED)


def _embed(
    builder: GraphBuilder, config: BertConfig, parameters: Mapping[str, ir.Value], prefix: str
) -> ir.Value:
    """Unit vectors [batch, width] of the texts in `<prefix>input_ids` and `<prefix>attention_mask`."""
    op = builder.op
    size = ["batch", f"{prefix}length"]
    tokens = builder.input(f"{prefix}input_ids", ir.DataType.INT64, size)
    attention_mask = builder.input(f"{prefix}attention_mask", ir.DataType.INT64, size)
    mask = op.Cast(attention_mask, to=ir.DataType.FLOAT)
    grid = op.Shape(tokens)
    scores_mask = op.Unsqueeze(op.Mul(op.Sub(1.0, mask), _MASKED), [1, 2])

    words = op.Gather(parameters["embeddings.word_embeddings.weight"], tokens)
    length = op.Slice(grid, [1], [2])
    positions = op.Slice(parameters["embeddings.position_embeddings.weight"], [0], length, [0])
    kind = op.Gather(parameters["embeddings.token_type_embeddings.weight"], 0)
    hidden = op.Reshape(op.Add(op.Add(words, positions), kind), [-1, config.hidden_size])
    hidden = _layer_norm(op, config, parameters, "embeddings.LayerNorm", hidden)
    for layer in range(config.num_hidden_layers):
        block = f"encoder.layer.{layer}"
        attended = _attention(op, config, parameters, f"{block}.attention", hidden, scores_mask, grid)
        hidden = _layer_norm(
            op, config, parameters, f"{block}.attention.output.LayerNorm", op.Add(attended, hidden)
        )
        inner = op.Gelu(_linear(op, parameters, f"{block}.intermediate.dense", hidden))
        outer = _linear(op, parameters, f"{block}.output.dense", inner)
        hidden = _layer_norm(op, config, parameters, f"{block}.output.LayerNorm", op.Add(outer, hidden))

    # The mean over a text's tokens is a product with its row of weights: no masked copy of the hidden states.
    weights = op.Div(mask, op.Max(op.ReduceSum(mask, [1], keepdims=1), 1.0))
    states = op.Reshape(hidden, op.Concat(grid, [config.hidden_size], axis=0))
    means = op.Squeeze(op.MatMul(op.Unsqueeze(weights, [1]), states), [1])
    return op.Div(means, op.Max(op.ReduceL2(means, [1], keepdims=1), 1e-12))


def _attention(
    op: OpBuilder,
    config: BertConfig,
    parameters: Mapping[str, ir.Value],
    name: str,
    hidden: ir.Value,
    scores_mask: ir.Value,
    grid: ir.Value,
) -> ir.Value:
    heads = config.num_attention_heads
    head_width = config.hidden_size // heads
    split = op.Concat(grid, [heads, head_width], axis=0)

    def by_head(part: str, order: list[int]) -> ir.Value:
        return op.Transpose(
            op.Reshape(_linear(op, parameters, f"{name}.self.{part}", hidden), split), perm=order
        )

    scores = op.MatMul(by_head("query", [0, 2, 1, 3]), by_head("key", [0, 2, 3, 1]))
    scores = op.Add(op.Mul(scores, 1.0 / math.sqrt(head_width)), scores_mask)
    attended = op.MatMul(op.Softmax(scores, axis=-1), by_head("value", [0, 2, 1, 3]))
    joined = op.Reshape(op.Transpose(attended, perm=[0, 2, 1, 3]), [-1, config.hidden_size])
    return _linear(op, parameters, f"{name}.output.dense", joined)


def _linear(op: OpBuilder, parameters: Mapping[str, ir.Value], name: str, x: ir.Value) -> ir.Value:
    return op.Gemm(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"], transB=1)


def _layer_norm(
    op: OpBuilder, config: BertConfig, parameters: Mapping[str, ir.Value], name: str, x: ir.Value
) -> ir.Value:
    return op.LayerNormalization(
        x,
        parameters[f"{name}.weight"],
        parameters[f"{name}.bias"],
        axis=-1,
        epsilon=config.layer_norm_eps,
    )


def _new_graph(
    name: str, config: BertConfig, parameters: Mapping[str, np.ndarray]
) -> tuple[GraphBuilder, dict[str, ir.Value]]:
    for parameter, shape in parameter_shapes(config).items():
        if parameter not in parameters or parameters[parameter].shape != shape:
            got = list(parameters[parameter].shape) if parameter in parameters else "none"
            raise ValueError(
                f"The encoder needs the parameter '{parameter}' of shape {list(shape)}; got {got}."
            )
    graph = ir.Graph(name=name, inputs=[], outputs=[], nodes=[], opset_imports={"": OPSET})
    builder = GraphBuilder(graph)
    names = parameter_shapes(config)
    values = {key: builder.initializer(ir.tensor(parameters[key]), key) for key in names}
    return builder, values


def _add_output(builder: GraphBuilder, value: ir.Value, name: str, shape: list[int | str]) -> None:
    value.dtype = ir.DataType.FLOAT
    value.shape = ir.Shape(shape)
    builder.add_output(value, name)


def _to_model(builder: GraphBuilder) -> onnx.ModelProto:
    return ir.to_proto(ir.Model(builder.graph, ir_version=IR_VERSION, producer_name="ort_ops"))
