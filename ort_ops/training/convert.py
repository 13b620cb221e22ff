"""Artifacts of onnxruntime-training become artifacts that train on the stock ONNX Runtime.

The training graph stays the one that onnxruntime-training built, node by node, but for the operators that
only that runtime has: norms' gradients become AddLayerNormGrad with the sums around them
(passes/use_add_layer_norm_grad.py), the others standard operators (peer_operators.py). Accumulation of
gradients and in-place updates leave the graph: the run time does them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ort_ops import operators, passes
from ort_ops.gradient.registry import OLDEST_OPSET
from ort_ops.training import losses, modes, peer_checkpoint
from ort_ops.training.artifact_files import write_artifacts
from ort_ops.training.checkpoint import STEP, Checkpoint
from ort_ops.training.model_file import read_model
from ort_ops.training.optimizer import (
    GRADIENT_SUFFIX,
    SGD,
    AdamW,
    AdamWForm,
    UpdateRule,
    build_optimizer_model,
    initial_state,
)
from ort_ops.training.peer_operators import PEER_DOMAIN, replace_peer_operators
from ort_ops.training.training_graphs import ADDITIONAL_OUTPUTS_KEY, FROZEN_KEY

IR_VERSION = 10
"""What the overloads of function bodies need, and ONNX Runtime 1.18 reads."""

_ACCUMULATOR = "InPlaceAccumulatorV2"
_BUFFER_SUFFIX = ".accumulation.buffer"
_CLIP = "InplaceClipGradNorm"
_BATCH_NORM = "BatchNormInternal"

_UNKNOWN_OPERATORS = "ort_ops.unknown_to_the_standard"
"""The domain in which operators pass through onnx's converter that it would refuse in the default one."""


def convert(source_directory: str | os.PathLike[str], target_directory: str | os.PathLike[str]) -> None:
    """Write the artifacts of `source_directory`, which onnxruntime-training made, for the stock runtime.

    Read are `training_model.onnx` and `checkpoint`, and `eval_model.onnx`, `optimizer_model.onnx` and
    `nominal_checkpoint` if they are there. Training goes on where it stopped: the checkpoint's parameters,
    optimizer state, step and properties are kept. Its learning rate is the optimizer's initial one, because
    that format holds no other. Files are written when everything could be converted, each whole.

    The models have the form that `build_artifacts` describes, of opset 18 or newer. Where the original graph
    computes a gradient that is not the derivative (Conv with auto_pad), this one does.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not what it should be; the graphs hold operators that cannot be replaced (all
            are listed); the optimizer is none that is known.
    """
    source = Path(source_directory)
    checkpoint = peer_checkpoint.read(source / "checkpoint")
    training = read_model(source / "training_model.onnx", external_data=True)
    models = {"training_model": _training_model(training, checkpoint)}
    if (source / "eval_model.onnx").is_file():
        models["eval_model"] = _eval_model(
            read_model(source / "eval_model.onnx", external_data=True), models["training_model"]
        )
    if (source / "optimizer_model.onnx").is_file():
        rule = _rule(read_model(source / "optimizer_model.onnx", external_data=True))
        models["optimizer_model"] = _optimizer_model(rule, models["training_model"], checkpoint)
        checkpoint = _with_state_of(models["optimizer_model"], checkpoint)
    write_artifacts(
        Path(target_directory),
        "",
        models,
        checkpoint,
        nominal_checkpoint=(source / "nominal_checkpoint").is_file(),
        ort_format=False,
        custom_op_library=None,
    )


# -- the training model --------------------------------------------------------------------------------------


def _training_model(proto: onnx.ModelProto, checkpoint: Checkpoint) -> onnx.ModelProto:
    model = _raised(proto)
    returned = [str(value.name) for value in model.graph.outputs[1:]]
    flags, trained = _return_gradients(model.graph)
    _check_parameters(model.graph, trained, checkpoint)
    _return_statistics(model.graph, checkpoint)
    passes.use_add_layer_norm_grad(model)
    replace_peer_operators(model)
    frozen = [str(value.name) for value in model.graph.inputs if value.name in checkpoint.frozen]
    model.metadata_props[FROZEN_KEY] = json.dumps(frozen)
    model.metadata_props[ADDITIONAL_OUTPUTS_KEY] = json.dumps(
        [name for name in returned if name not in flags]
    )
    return _finished(model)


def _check_parameters(graph: ir.Graph, trained: set[str], checkpoint: Checkpoint) -> None:
    wanted = set(checkpoint.parameters) - checkpoint.frozen
    missing = sorted(set(checkpoint.parameters) - {str(value.name) for value in graph.inputs})
    wrong = missing or sorted(wanted ^ trained)
    if wrong:
        raise ValueError(
            "convert: the training model and the checkpoint must have the same parameters, trained and "
            f"frozen; they differ in {', '.join(wrong)}. Do the two belong together?"
        )


def _return_gradients(graph: ir.Graph) -> tuple[set[str], set[str]]:
    """Return each gradient instead of adding it to a buffer.

    The buffers, the signal that resets them and the flags that tell of the sum go. Returns the names of the
    flags and of the parameters that have gradients.
    """
    accumulators = [node for node in graph if node.domain == PEER_DOMAIN and node.op_type == _ACCUMULATOR]
    if not accumulators:
        raise ValueError(
            f"convert: the training model adds no gradients up ({PEER_DOMAIN}::{_ACCUMULATOR}); is it one of "
            "onnxruntime-training's artifacts?"
        )
    flags = {value for node in accumulators for value in node.outputs}
    graph.outputs[:] = [value for value in graph.outputs if value not in flags]
    bookkeeping = {value for node in accumulators for value in (node.inputs[0], node.inputs[2])}
    gradients = [(node.inputs[0], node.inputs[1]) for node in accumulators]
    graph.remove(accumulators, safe=True)
    graph.inputs[:] = [value for value in graph.inputs if value not in bookkeeping]
    trained = set()
    for buffer, gradient in gradients:
        assert buffer is not None and gradient is not None
        name = str(buffer.name).removesuffix(_BUFFER_SUFFIX)
        trained.add(name.removesuffix(GRADIENT_SUFFIX))
        gradient.type, gradient.shape = buffer.type, buffer.shape
        graph.outputs.append(_named(graph, gradient, name))
    return {str(value.name) for value in flags}, trained


def _return_statistics(graph: ir.Graph, checkpoint: Checkpoint) -> None:
    """Return the running statistics of batch norms, which that runtime updates in place."""
    for node in list(graph):
        if node.domain != PEER_DOMAIN or node.op_type != _BATCH_NORM:
            continue
        for source, updated in ((node.inputs[3], node.outputs[1]), (node.inputs[4], node.outputs[2])):
            if source is not None and source.name in checkpoint.frozen:
                updated.type, updated.shape = source.type, source.shape
                graph.outputs.append(_named(graph, updated, f"{source.name}{modes.UPDATED_SUFFIX}"))


def _named(graph: ir.Graph, value: ir.Value, name: str) -> ir.Value:
    """`value` under this name, or a copy of it where its own name is needed."""
    if value.name == name and not value.is_graph_output():
        return value
    if value.producer() is not None and not value.is_graph_output():
        value.name = name
        return value
    copy = ir.node("Identity", [value])
    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
    copy.outputs[0].name = name
    graph.append(copy)
    return copy.outputs[0]


# -- the evaluation model ------------------------------------------------------------------------------------


def _eval_model(proto: onnx.ModelProto, training: onnx.ModelProto) -> onnx.ModelProto:
    model = _raised(proto)
    modes.set_evaluation_mode(model)
    replace_peer_operators(model)
    model.metadata_props.update((entry.key, entry.value) for entry in training.metadata_props)
    return _finished(model)


# -- both models ---------------------------------------------------------------------------------------------


def _raised(proto: onnx.ModelProto) -> ir.Model:
    """The model at the opset that replacements are written for, its types known."""
    model = ir.from_proto(proto)
    _ignore_as_the_peer(model)
    with _hidden_from_the_converter(model):
        raised = passes.upgrade_opset(model, OLDEST_OPSET)
    _uncover(raised)
    passes.infer_shapes(raised)
    _note_labels(raised)
    return raised


def _ignore_as_the_peer(model: ir.Model) -> None:
    """Without ignore_index, that runtime's cross entropy ignores labels of -1."""
    for node in _cross_entropies(model):
        if "ignore_index" not in node.attributes:
            node.attributes.add(ir.AttrInt64("ignore_index", -1))


def _note_labels(model: ir.Model) -> None:
    """Let the run time check the labels before it runs; that runtime reads beyond the scores for wrong
    ones."""
    for node in _cross_entropies(model):
        scores, labels = node.inputs[:2]
        if labels is None or not labels.is_graph_input():
            continue
        classes = scores.shape[1] if scores is not None and scores.shape is not None else None
        check = losses.LabelCheck(
            str(labels.name),
            classes if isinstance(classes, int) else None,
            node.attributes["ignore_index"].as_int(),
        )
        model.metadata_props[losses.LABELS_KEY] = losses.note_label_check(model.metadata_props, check)


def _cross_entropies(model: ir.Model) -> Iterator[ir.Node]:
    return (
        node
        for node in model.graph.all_nodes()
        if node.domain == "" and node.op_type == "SoftmaxCrossEntropyLoss"
    )


@contextmanager
def _hidden_from_the_converter(model: ir.Model) -> Iterator[None]:
    """Move what the standard does not know to another domain: LayerNormalization before opset 17, say."""
    version = model.opset_imports.get("", OLDEST_OPSET)
    for node in model.graph.all_nodes():
        if node.domain == "" and not onnx.defs.has(node.op_type, version, ""):
            node.domain = _UNKNOWN_OPERATORS
            model.opset_imports[_UNKNOWN_OPERATORS] = 1
    yield
    _uncover(model)


def _uncover(model: ir.Model) -> None:
    if model.opset_imports.pop(_UNKNOWN_OPERATORS, None) is not None:
        for node in model.graph.all_nodes():
            if node.domain == _UNKNOWN_OPERATORS:
                node.domain = ""


def _finished(model: ir.Model) -> onnx.ModelProto:
    RemoveUnusedNodesPass()(model)
    used = {node.domain for node in model.graph.all_nodes()} | {""}
    for domain in list(model.opset_imports):
        if domain not in used:
            del model.opset_imports[domain]
    model.ir_version = IR_VERSION
    return operators.embed_functions(ir.to_proto(model))


# -- the optimizer -------------------------------------------------------------------------------------------


def _rule(proto: onnx.ModelProto) -> UpdateRule:
    """The update that an optimizer model of onnxruntime-training makes."""
    nodes = {node.op_type: _attributes(node) for node in proto.graph.node}
    clip = nodes.pop(_CLIP, None)
    max_norm = None if clip is None else clip.get("max_norm", 1.0)
    if len(nodes) == 1 and "AdamWOptimizer" in nodes:
        return _adamw(nodes["AdamWOptimizer"], max_norm)
    if len(nodes) == 1 and "SGDOptimizerV2" in nodes:
        return SGD(max_gradient_norm=max_norm)
    raise ValueError(
        "convert: the optimizer model must consist of an AdamWOptimizer or SGDOptimizerV2, with or without "
        f"{_CLIP}; its nodes are {', '.join(node.op_type for node in proto.graph.node)}."
    )


def _attributes(node: onnx.NodeProto) -> dict[str, float]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def _adamw(attributes: dict[str, float], max_gradient_norm: float | None) -> AdamW:
    """Attributes are stored in float32; 0.9 shall be 0.9 again. Defaults are the kernel's."""

    def number(name: str, default: float) -> float:
        return float(np.format_float_positional(np.float32(attributes.get(name, default)), unique=True))

    return AdamW(
        betas=(number("alpha", 0.9), number("beta", 0.999)),
        epsilon=number("epsilon", 1e-8),
        weight_decay=number("weight_decay", 1e-2),
        bias_correction=bool(attributes.get("correct_bias", 1)),
        form=AdamWForm.HUGGING_FACE if attributes.get("adam_mode", 0) else AdamWForm.PYTORCH,
        max_gradient_norm=max_gradient_norm,
    )


def _optimizer_model(rule: UpdateRule, training: onnx.ModelProto, checkpoint: Checkpoint) -> onnx.ModelProto:
    names = [output.name.removesuffix(GRADIENT_SUFFIX) for output in training.graph.output]
    trainable = [name for name in names if name in checkpoint.parameters and name not in checkpoint.frozen]
    return build_optimizer_model(
        {
            name: (
                checkpoint.parameters[name].shape,
                onnx.helper.np_dtype_to_tensor_dtype(checkpoint.parameters[name].dtype),
            )
            for name in trainable
        },
        rule,
    )


def _with_state_of(optimizer_model: onnx.ModelProto, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the state that the optimizer has; that runtime keeps unused moments for SGD."""
    if not checkpoint.optimizer_state:
        return checkpoint
    wanted = initial_state(optimizer_model)
    missing = sorted(set(wanted) - set(checkpoint.optimizer_state) - {STEP})
    if missing:
        raise ValueError(f"convert: the checkpoint's optimizer state lacks {', '.join(missing)}.")
    state = {name: checkpoint.optimizer_state[name] for name in wanted}
    return Checkpoint(
        parameters=checkpoint.parameters,
        optimizer_state=state,
        learning_rate=checkpoint.learning_rate,
        frozen=checkpoint.frozen,
        properties=checkpoint.properties,
        nominal=checkpoint.nominal,
    )
