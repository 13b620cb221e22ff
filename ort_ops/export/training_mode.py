"""What a module in training mode means and the exporter does not see: where gradients stop, and that dropout
draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch

from ort_ops.export.errors import ExportError
from ort_ops.gradient.stop_gradient import DOMAIN, STOP_GRADIENT, stop_gradient_function


@contextlib.contextmanager
def own_gradients_refused() -> Iterator[None]:
    """Refuse to trace an autograd.Function: its `backward` would be lost without a word.

    Raises ExportError when one is called within the context.
    """

    def refuse(cls: type[torch.autograd.Function], *arguments: Any, **keywords: Any) -> Any:
        raise ExportError(
            f"{cls.__module__}.{cls.__qualname__} is an autograd.Function, and its backward cannot be "
            "exported; write its forward so that the gradient follows from it (x.detach() stops a gradient)."
        )

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse)):
        yield


def stop_gradients(program: torch.export.ExportedProgram) -> None:
    """Let the results of each `with torch.no_grad()` be detached, in place."""
    for part in program.graph_module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
                _detach_results(part.get_submodule(str(node.args[1].target)))


def _detach_results(part: torch.nn.Module) -> None:
    assert isinstance(part, torch.fx.GraphModule)
    output = part.graph.output_node()
    for result in list(output.all_input_nodes):
        value = result.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            with part.graph.inserting_before(output):
                detached = part.graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            output.replace_input_with(result, detached)
    part.recompile()


def switch_dropout_on(graph: ir.Graph) -> None:
    """Set the training mode of every Dropout that has none: so the exporter writes that of
    `scaled_dot_product_attention`, and it would do nothing.
    """
    for node in list(graph.all_nodes()):
        if node.domain != "" or node.op_type != "Dropout" or len(node.inputs) > 2:
            continue
        training_mode = ir.node("Constant", [], attributes={"value": ir.tensor(True)})
        training_mode.outputs[0].dtype = ir.DataType.BOOL
        training_mode.outputs[0].shape = ir.Shape([])
        assert node.graph is not None
        node.graph.insert_before(node, training_mode)
        node.resize_inputs(3)
        node.replace_input_with(2, training_mode.outputs[0])


def add_stop_gradient(model: ir.Model) -> None:
    """Give the model the body of StopGradient if it contains the operator."""
    if any((node.domain, node.op_type) == (DOMAIN, STOP_GRADIENT) for node in model.graph.all_nodes()):
        function = ir.serde.deserialize_function(stop_gradient_function(model.opset_imports[""]))
        model.functions[function.identifier()] = function
        model.opset_imports[DOMAIN] = 1
