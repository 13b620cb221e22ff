"""From a forward model to a training model: the one public way into this package."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from ort_ops import operators, passes
from ort_ops.gradient import rules as rules  # registers the rules
from ort_ops.gradient.driver import differentiate
from ort_ops.gradient.emitter import Emitter, NameScope
from ort_ops.gradient.errors import GradientError
from ort_ops.gradient.paths import FLOATS, Paths, bodies, describe, reachable
from ort_ops.gradient.registry import OLDEST_OPSET
from ort_ops.gradient.stop_gradient import become_copies
from ort_ops.passes.data_free import data_free_proto

IR_VERSION = 10
"""What ONNX Runtime 1.18 reads, and what the overloads of function bodies need."""

GRADIENT_SUFFIX = "_grad"


def build_gradient_model(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | None = None,
    loss: str = "loss",
) -> onnx.ModelProto:
    """Build the model that computes the loss and its gradients.

    Args:
        model: the forward model, or the path of its file. It has an output `loss` with one element. It is not
            changed. Tensors in external files stay there and are not read (but for small ones that shapes
            depend on).
        requires_grad: names of the tensors to differentiate by: initializers, outputs of Constant nodes, or
            floating-point graph inputs. By default every floating-point initializer that reaches the loss.
        loss: name of the loss among the graph's outputs.

    Returns:
        A model with the initializers of `requires_grad` as graph inputs of the same names, after the original
        inputs, and with the original outputs followed by `<name>_grad` for each name, of that tensor's shape
        and type. LayerNorms are differentiated by `ai.onnx.contrib::AddLayerNormGrad`, whose body the model
        carries as a function: it runs faster with the plugin registered, and also without. The default opset
        is that of `model`, raised to 18 if it is older; the IR version is 10. If the model itself uses the
        name `<name>_grad` for an input, output or initializer, a number is put behind the gradient's name.

    Raises:
        GradientError: unknown, unreachable or not floating-point names; a loss that is missing or not a
            scalar; operators without a rule (all of them are listed); a model that the checker refuses or
            that already has gradients.
    """
    ir_model = _read(model)
    original = list(ir_model.graph.initializers)
    _refuse_gradient_model(ir_model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(ir_model)
    tensors = {name: value.const_value for name, value in ir_model.graph.initializers.items()}
    wanted = _default_names(ir_model, original, loss) if requires_grad is None else list(requires_grad)
    _check_names(ir_model.graph, wanted)
    _make_inputs(ir_model.graph, wanted)
    try:
        ir_model = passes.prepare(ir_model, OLDEST_OPSET)
        graph, opsets = ir_model.graph, ir_model.opset_imports
        passes.fuse_cross_entropy(ir_model)
        loss_value = _checked_loss(graph, loss)
        inputs = {value.name: value for value in graph.inputs}
        parameters = [inputs[name] for name in wanted]
        passes.fuse_attention(ir_model, parameters)
        passes.fuse_linear(ir_model, parameters)
        _expand_what_has_no_rule(ir_model, loss_value, parameters)
    except passes.PassError as error:
        raise GradientError(str(error)) from error
    if requires_grad is None:
        parameters = _keep_reachable(ir_model, loss_value, parameters, tensors)
    emit = Emitter(_free_names(graph, parameters), opsets[""])
    graph.outputs.extend(differentiate(graph, opsets, loss_value, parameters, emit))
    for domain, version in emit.domains.items():
        opsets.setdefault(domain, version)
    become_copies(graph)
    passes.keep_dropout(graph)
    passes.fuse_add_layer_norm(ir_model)
    ir_model.ir_version = IR_VERSION
    return operators.embed_functions(ir.to_proto(ir_model))


# -- reading the model ---------------------------------------------------------------------------------------


def _read(model: onnx.ModelProto | str | os.PathLike[str]) -> ir.Model:
    """The model in memory, checked, with no initializer among the inputs."""
    if isinstance(model, onnx.ModelProto):
        ir_model = _from_proto(model)
    else:
        path = Path(model)
        if not path.is_file():
            raise GradientError(f"there is no model file {str(path)!r}")
        ir_model = ir.load(path)
        _check_external_files(ir_model, path.parent)
    try:
        onnx.checker.check_model(data_free_proto(ir_model))
    except onnx.checker.ValidationError as error:
        raise GradientError(
            f"onnx's checker refuses the model: {error}; mend it before building gradients"
        ) from error
    for value in list(ir_model.graph.inputs):
        if value.is_initializer():
            ir_model.graph.inputs.remove(value)
    return ir_model


def _from_proto(proto: onnx.ModelProto) -> ir.Model:
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir wraps whatever it stumbles over in exceptions of its own
        raise GradientError(
            f"the model cannot be read: {error.__cause__ or error}; check it with onnx.checker"
        ) from error
    # A tensor of onnx_ir is a view of the caller's message, and renaming a value renames it: put a layer in
    # between.
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.const_value = _view(value.const_value)
    for node in model.graph.all_nodes():
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                node.attributes.add(ir.AttrTensor(attribute.name, _view(attribute.as_tensor())))
    return model


def _view(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if not isinstance(tensor, ir.serde.TensorProtoTensor):
        return tensor
    return ir.LazyTensor(lambda: tensor, dtype=tensor.dtype, shape=ir.Shape(tensor.shape), name=tensor.name)


def _check_external_files(model: ir.Model, folder: Path) -> None:
    tensors = [value.const_value for value in model.graph.initializers.values()]
    locations = {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    missing = sorted(location for location in locations if not (folder / location).is_file())
    if missing:
        raise GradientError(
            f"the model's tensors are in {', '.join(map(repr, missing))}, which is not in its "
            f"folder {str(folder)!r}; put the file there"
        )


def _refuse_gradient_model(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if node.domain != "" and node.op_type.endswith("Grad"):
            raise GradientError(
                f"the model already has gradients: it contains {describe(node)}; "
                "pass the forward model instead"
            )


# -- the parameters ------------------------------------------------------------------------------------------


def _default_names(model: ir.Model, original: Iterable[str], loss: str) -> list[str]:
    """The floating-point initializers of the model as it was given that may reach the loss."""
    initializers = model.graph.initializers
    candidates = [initializers[name] for name in original if initializers[name].dtype in FLOATS]
    outputs = [value for value in model.graph.outputs if value.name == loss]
    if not outputs:
        return []  # _checked_loss says what is wrong
    return [str(value.name) for value in reachable(model.graph, model.opset_imports, outputs[0], candidates)]


def _check_names(graph: ir.Graph, names: Sequence[str]) -> None:
    known = {value.name: value for value in graph.inputs} | dict(graph.initializers)
    unknown = [name for name in names if name not in known]
    if unknown:
        near = {name: difflib.get_close_matches(name, [str(key) for key in known], n=1) for name in unknown}
        hints = [
            f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else "") for name, close in near.items()
        ]
        raise GradientError(
            f"requires_grad names {', '.join(hints)}, which is no initializer or input of the graph; "
            "take the names from [tensor.name for tensor in model.graph.initializer]"
        )
    doubled = sorted({name for name in names if list(names).count(name) > 1})
    if doubled:
        raise GradientError(
            f"requires_grad names {', '.join(map(repr, doubled))} more than once; name each tensor once"
        )
    wrong = [name for name in names if known[name].dtype not in FLOATS]
    if wrong:
        listed = ", ".join(f"{name!r} ({_type_name(known[name])})" for name in wrong)
        raise GradientError(
            f"requires_grad names {listed}, but only float, double, float16 and bfloat16 tensors have "
            "gradients; take it out of requires_grad"
        )


def _type_name(value: ir.Value) -> str:
    return "of unknown type" if value.dtype is None else value.dtype.name.lower()


def _make_inputs(graph: ir.Graph, names: Sequence[str]) -> None:
    """Turn initializers into graph inputs of the same name, after the others."""
    for name in names:
        if name in graph.initializers:
            value = graph.initializers.pop(name)
            value.const_value = None
            graph.inputs.append(value)


def _keep_reachable(
    model: ir.Model,
    loss: ir.Value,
    parameters: Sequence[ir.Value],
    tensors: dict[str, ir.TensorProtocol | None],
) -> list[ir.Value]:
    """The parameters that reach the loss; the others become initializers again."""
    reached = reachable(model.graph, model.opset_imports, loss, parameters)
    for value in parameters:
        if value not in reached:
            model.graph.inputs.remove(value)
            value.const_value = tensors[str(value.name)]
            model.graph.register_initializer(value)
    if not reached:
        raise GradientError(
            f"no floating-point initializer reaches the loss {loss.name!r}, so there is nothing to "
            "differentiate by; name tensors in requires_grad (outputs of Constant nodes and inputs of the "
            "graph are allowed)"
        )
    return reached


def _expand_what_has_no_rule(model: ir.Model, loss: ir.Value, parameters: Sequence[ir.Value]) -> None:
    """Nodes on the way that the standard defines by others become those, until all have rules or nothing is
    left to do."""
    while True:
        paths = Paths(model.graph, model.opset_imports, loss, parameters)
        if not passes.expand_functions(model, paths.blocking):
            return
        passes.infer_shapes(model)
        if passes.fold_constants(model):  # bodies choose between their branches by shapes
            passes.infer_shapes(model)


# -- the loss and the names ----------------------------------------------------------------------------------


def _checked_loss(graph: ir.Graph, name: str) -> ir.Value:
    found = [value for value in graph.outputs if value.name == name]
    if not found:
        outputs = ", ".join(repr(value.name) for value in graph.outputs)
        raise GradientError(f"the model has no output {name!r} to use as the loss; its outputs are {outputs}")
    loss = found[0]
    if loss.dtype not in FLOATS:
        raise GradientError(f"the loss {name!r} must be a floating-point tensor; it is {_type_name(loss)}")
    if loss.shape is None:
        raise GradientError(
            f"the loss {name!r} must be a scalar, but its shape is not known; "
            "declare it as an output of shape []"
        )
    if any(size != 1 for size in loss.shape):
        raise GradientError(
            f"the loss {name!r} must be a scalar; its shape is {loss.shape}. Reduce it in the model, "
            "for example with ReduceMean"
        )
    return loss


def _free_names(graph: ir.Graph, parameters: Sequence[ir.Value]) -> NameScope:
    """All names of the graph; values inside it that have a gradient's name make way for it."""
    names: set[str] = set()
    promised = {f"{value.name}{GRADIENT_SUFFIX}" for value in parameters}
    interface = {value.name for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]}
    in_the_way = []
    for node in graph.all_nodes():
        names.add(node.name or "")
        for value in node.outputs:
            if value.name in promised and value.name not in interface:
                in_the_way.append(value)
            else:
                names.add(value.name or "")
        for body in bodies(node):
            names.update(str(value.name) for value in body.inputs)
            names.update(body.initializers)
    scope = NameScope(names | {str(name) for name in interface} | promised)
    for value in in_the_way:
        value.name = scope.fresh(f"{value.name}_of_the_model")
    scope.release(promised - {str(name) for name in interface})
    return scope
