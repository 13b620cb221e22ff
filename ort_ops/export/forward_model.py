"""From a PyTorch module to a forward model in ONNX, in training or in evaluation mode.

PyTorch's exporter is told to leave weights alone, so that a tensor of the graph is what `state_dict` has
under the same name.
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import nn

from ort_ops.export.arguments import Arguments, DynamicShapes, Example, dynamic_axes, type_of
from ort_ops.export.errors import ExportError
from ort_ops.export.names import forget_origin, name_dimensions, name_initializers, name_outputs
from ort_ops.export.training_mode import (
    add_stop_gradient,
    own_gradients_refused,
    stop_gradients,
    switch_dropout_on,
)
from ort_ops.export.translations import EVALUATION, TRAINING, Translations

LOSS = "loss"


def forward_model_from_torch(
    module: nn.Module,
    example_inputs: Example,
    *,
    training: bool = False,
    loss: nn.Module | None = None,
    example_targets: Example = (),
    dynamic_shapes: DynamicShapes | None = None,
) -> onnx.ModelProto:
    """Export the forward pass of a module as an ONNX model with the module's own names.

    Args:
        module: any module that `torch.export` can follow; `transformers` models too. It is not changed.
        example_inputs: a tensor, the positional arguments of `forward`, or its keyword arguments. Only types
            and shapes matter. None, numbers and strings become part of the graph as they are.
        training: export what the module does in training mode (dropout draws, BatchNorm takes the batch's
            statistics). A module in evaluation mode is exported as after `module.train()`; one in training
            mode as it stands, so that submodules which were put in evaluation mode stay there.
        loss: called with the first tensor that the module returns and with the targets; must give a scalar.
        example_targets: the further arguments of `loss`, in the same forms as `example_inputs`.
        dynamic_shapes: the axes whose size may change, by input: `{"tokens": {0: "batch", 1: "sequence"}}`.
            Axes of one name have one size. What `torch.export` takes (`Dim`) may stand for a name. An input
            that is not mentioned has `{0: "batch"}`.

    Returns:
        The model. Inputs are named as the arguments of `forward`, then those of `loss`; initializers as in
        `state_dict`, a tied one once, by its first name. Outputs are `loss` if there is one (the module's
        own is a tensor of that key, or a first tensor without axes); the tensors that the module returns, by
        the keys of a mapping, `output` for a single tensor, `output_0`, ... for a sequence (what is no
        tensor, such as a cache, is left out; a name that an input or parameter has gets `_output` behind it);
        and `<buffer>_updated` for each buffer that the forward pass changes.

    Raises:
        ExportError: inputs that are no tensors, a module that cannot be traced (with the line of Python) or
            holds an operator without an ONNX form, axes or names that do not fit.
    """
    _check_module(module, loss)
    inputs = Arguments.of(module, example_inputs, "example_inputs")
    targets = None if loss is None else Arguments.of(loss, example_targets, "example_targets", skip=1)
    names = [*inputs.names, *(targets.names if targets else ())]
    tensors = [*inputs.tensors, *(targets.tensors if targets else ())]
    _check_names(module, names)
    axes = dynamic_axes(names, tensors, dynamic_shapes or {})
    output_names: list[str] = []
    traced = _Traced(module, loss, inputs, targets, output_names)
    with _mode(module, training), _quiet(), own_gradients_refused() if training else contextlib.nullcontext():
        program = _trace(traced, tensors, axes)
        if training:
            stop_gradients(program)
        model = _to_onnx(module, program, names, TRAINING if training else EVALUATION)
    name_initializers(model.graph, module)
    name_outputs(model.graph, output_names, [name for name, _ in module.named_buffers()])
    name_dimensions(model.graph, axes)
    forget_origin(model)
    if training:
        switch_dropout_on(model.graph)
        add_stop_gradient(model)
    RemoveUnusedNodesPass()(model)
    return ir.to_proto(model)


def _check_module(module: nn.Module, loss: nn.Module | None) -> None:
    if not isinstance(module, nn.Module):
        raise ExportError(f"module must be a torch.nn.Module; it is {type_of(module)}.")
    learned = [] if loss is None else [name for name, _ in loss.named_parameters()]
    if learned:
        raise ExportError(
            f"the loss {type(loss).__name__} has parameters of its own ({', '.join(learned)}); make it a "
            "part of the module, let the module return the loss, and leave out `loss`."
        )


def _check_names(module: nn.Module, names: Sequence[str]) -> None:
    taken = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    for index, name in enumerate(names):
        if name in taken or name in names[:index]:
            raise ExportError(
                f"{type(module).__name__}: an input is called {name!r}, and so is another input or a tensor "
                "of the module, but a graph has one tensor of a name; rename the argument."
            )


class _Traced(nn.Module):
    """The module, with its loss, as a function from tensors to tensors."""

    def __init__(
        self,
        module: nn.Module,
        loss: nn.Module | None,
        inputs: Arguments,
        targets: Arguments | None,
        output_names: list[str],
    ) -> None:
        """`output_names` is filled when the module is called."""
        super().__init__()
        self.module = module
        self.loss_module = loss
        self._arguments = inputs, targets

        # Not an attribute: torch.export sets those back to what they were.
        def note_outputs(names: Iterable[str]) -> None:
            output_names[:] = names

        self._note_outputs = note_outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs, targets = self._arguments
        positional, keywords = inputs.filled(tensors[: len(inputs.names)])
        outputs = _named_tensors(self.module(*positional, **keywords), self.module)
        if self.loss_module is not None and targets is not None:
            positional, keywords = targets.filled(tensors[len(inputs.names) :])
            prediction = next(iter(outputs.values()))
            outputs = {LOSS: self.loss_module(prediction, *positional, **keywords), **outputs}
        self._note_outputs(outputs)
        # Read after the call: tracing sees the values that the call left in the buffers.
        buffers = [buffer.clone() for _, buffer in self.module.named_buffers()]
        return (*outputs.values(), *buffers)


def _named_tensors(result: Any, module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of what a module returned, named by their places in it, the loss first."""
    found: dict[str, torch.Tensor] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name or "output"] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(f"{name or 'output'}_{index}", item)

    visit("", result)
    if not found:
        raise ExportError(
            f"{type(module).__name__} returns something {type_of(result)} with no tensor in it; return a "
            "tensor, or a sequence or mapping of tensors."
        )
    first = next(iter(found))
    loss = LOSS if LOSS in found or found[first].ndim else first
    return {LOSS: found.pop(loss), **found} if loss in found else found


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode for as long as the context lasts."""
    before = {part: part.training for part in module.modules()}
    if not (training and module.training):
        module.train(training)
    try:
        yield
    finally:
        for part, flag in before.items():
            part.training = flag


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings: they speak of training mode, which is meant here, and of itself."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# -- PyTorch's exporter --------------------------------------------------------------------------------------


def _trace(
    traced: _Traced, tensors: Sequence[torch.Tensor], axes: Sequence[Mapping[int, Any]]
) -> torch.export.ExportedProgram:
    dynamic = torch.export.Dim.DYNAMIC  # type: ignore[attr-defined]
    shapes = tuple(
        {axis: dynamic if isinstance(name, str) else name for axis, name in of_input.items()}
        for of_input in axes
    )
    try:
        return torch.export.export(traced, tuple(tensors), dynamic_shapes=(shapes,), strict=False)
    except ExportError:
        raise
    except Exception as error:  # the tracer runs the module's code, which may raise anything
        raise ExportError(_trace_failure(traced.module, error)) from error


def _trace_failure(module: nn.Module, error: Exception) -> str:
    mode = "training" if module.training else "evaluation"
    text = (
        f"torch.export cannot follow {type(module).__name__} in {mode} mode{_place(error)}: "
        f"{_first_line(error)}."
    )
    if "data-dependent" in str(error):
        return (
            f"{text} The Python code there decides by a tensor's value (an if, int(), .item()), which the "
            "graph cannot do: write it with torch.where; if only training does it, put that submodule in "
            "evaluation mode (submodule.eval() after module.train())."
        )
    if "onstraint" in str(error) or "dynamic" in str(error):
        return f"{text} An axis that the module needs at one size must be left out of dynamic_shapes."
    return text


def _place(error: BaseException) -> str:
    """The innermost line of Python on the way to the error that is not PyTorch's or this file's."""
    excluded = (str(Path(torch.__file__).parent), __file__)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(excluded)]
    return f" (line {own[-1].lineno} of {own[-1].filename}: {own[-1].line})" if own else ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0].rstrip('. ')}"


def _to_onnx(
    module: nn.Module,
    program: torch.export.ExportedProgram,
    names: Sequence[str],
    translations: Translations,
) -> ir.Model:
    try:
        exported = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,  # it would fold, rename and transpose weights
            verbose=False,
            input_names=list(names),
            custom_translation_table=translations,
        )
    except Exception as error:
        raise ExportError(_conversion_failure(module, program, error)) from error
    assert exported is not None
    return exported.model


_NO_FORM = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>")


def _conversion_failure(module: nn.Module, program: torch.export.ExportedProgram, error: Exception) -> str:
    text = f"torch.onnx cannot write {type(module).__name__} in ONNX: "
    causes = list(_causes(error))
    missing = _NO_FORM.search("\n".join(map(str, causes)))
    if missing is None:
        return f"{text}{_first_line(causes[-1])}."
    operator = f"{missing[1]}.{missing[2]}"
    return f"{text}it has no form for {operator}{_use(program, operator)}; use another operator there."


def _use(program: torch.export.ExportedProgram, operator: str) -> str:
    """Where the module uses an operator, by the trace's own notes."""
    for node in program.graph.nodes:
        if node.op == "call_function" and _base_name(str(node.target)) == _base_name(operator):
            lines = [line.strip() for line in (node.stack_trace or "").strip().splitlines()]
            return f" ({'; '.join(lines[-2:])})" if lines else ""
    return ""


def _base_name(operator: str) -> str:
    """Without namespace, overload, and the underscore that the exporter's own forms begin with."""
    return operator.split(".")[1].strip("_") if "." in operator else operator


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
