"""AdamW: one update of one parameter in one pass over memory.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2, in the two forms
that are in use: PyTorch's and Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto
from onnx.reference.op_run import OpRun

from ort_ops.operators.inference import Inference
from ort_ops.operators.operator import DOMAIN, Attribute, AttributeValue, Operator, Slot

_FORMS = ("pytorch", "hugging_face")


def _body(present: frozenset[str], attributes: Mapping[str, AttributeValue]) -> str:
    """Each value on its own line, in the order in which the kernel rounds."""
    root = (
        "scaled_root = Mul (root, inverse_root)"
        if "inverse_root" in present
        else _same("scaled_root", "root")
    )
    decays_last = attributes["form"] == "hugging_face"
    if "decay" not in present:
        decay_first, decay_last = _same("decayed", "parameter"), _same("new_parameter", "moved")
    elif decays_last:
        decay_first, decay_last = _same("decayed", "parameter"), "new_parameter = Mul (moved, decay)"
    else:
        decay_first, decay_last = "decayed = Mul (parameter, decay)", _same("new_parameter", "moved")
    results = "\n        ".join(
        f"{old}_updated = Where (update, {new}, {old})"
        if "update" in present
        else _same(f"{old}_updated", new)
        for old, new in (
            ("parameter", "new_parameter"),
            ("first_moment", "new_first"),
            ("second_moment", "new_second"),
        )
    )
    return f"""
        beta1 = Constant <value_float: float = @beta1> ()
        beta2 = Constant <value_float: float = @beta2> ()
        epsilon = Constant <value_float: float = @epsilon> ()
        kept_first = Mul (first_moment, beta1)
        fresh_first = Mul (gradient, gradient_weight)
        new_first = Add (kept_first, fresh_first)
        kept_second = Mul (second_moment, beta2)
        square = Mul (gradient, gradient)
        fresh_second = Mul (square, square_weight)
        new_second = Add (kept_second, fresh_second)
        root = Sqrt (new_second)
        {root}
        denominator = Add (scaled_root, epsilon)
        direction = Div (new_first, denominator)
        move = Mul (direction, step_size)
        {decay_first}
        moved = Sub (decayed, move)
        {decay_last}
        {results}
    """


def _same(name: str, value: str) -> str:
    return f"{name} = Identity ({value})"


def _infer(node: Inference) -> None:
    """Each result is as the tensor that it replaces."""
    node.check_rank("parameter", 0)
    for name in ("gradient", "first_moment", "second_moment"):
        node.check_same_shape(name, "parameter")
    for name in ("gradient_weight", "square_weight", "step_size", "inverse_root", "decay", "update"):
        node.check_scalar(name)
    form = node.attribute("form")
    if form not in (None, *_FORMS):
        node.fail("form must be pytorch or hugging_face", str(form))
    for index in range(3):
        node.set_output(index, TensorProto.FLOAT, node.shapes.get("parameter"))


class AdamW(OpRun):
    """The operator for `onnx.reference`: float64 inside, each result rounded once."""

    op_domain = DOMAIN

    def _run(
        self,
        parameter: np.ndarray,
        gradient: np.ndarray,
        first_moment: np.ndarray,
        second_moment: np.ndarray,
        gradient_weight: np.ndarray,
        square_weight: np.ndarray,
        step_size: np.ndarray,
        inverse_root: np.ndarray | None = None,
        decay: np.ndarray | None = None,
        update: np.ndarray | None = None,
        form: str = "pytorch",
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
    ) -> tuple[np.ndarray, ...]:
        if update is not None and not update.item():
            return parameter, first_moment, second_moment

        def scalar(array: np.ndarray | None) -> float:
            return 1.0 if array is None else float(array.item())

        g = gradient.astype(np.float64)
        first = first_moment * float(beta1) + g * scalar(gradient_weight)
        second = second_moment * float(beta2) + g**2 * scalar(square_weight)
        move = first / (np.sqrt(second) * scalar(inverse_root) + epsilon) * scalar(step_size)
        decay_first, decay_last = (1.0, scalar(decay)) if form == "hugging_face" else (scalar(decay), 1.0)
        new = (parameter * decay_first - move) * decay_last
        return tuple(array.astype(np.float32) for array in (new, first, second))


ADAMW = Operator(
    name="AdamW",
    doc=(
        "One update of one parameter by AdamW, in this order of operations, each rounded to float: "
        "m' = m * beta1 + g * gradient_weight, v' = v * beta2 + (g * g) * square_weight, "
        "move = m' / (sqrt(v') * inverse_root + epsilon) * step_size; form = pytorch: p' = p * decay - move; "
        "form = hugging_face: p' = (p - move) * decay. The scalars are the same for all parameters, so a "
        "model computes them once: gradient_weight = (1 - beta1) * s and square_weight = (1 - beta2) * s^2, "
        "where s scales the gradient; step_size = learning_rate / (1 - beta1^t), "
        "inverse_root = 1 / sqrt(1 - beta2^t), decay = 1 - learning_rate * weight_decay."
    ),
    inputs=(
        Slot("parameter", "tensor(float)", "p; rank 0 to 8"),
        Slot("gradient", "tensor(float)", "as parameter: g"),
        Slot("first_moment", "tensor(float)", "as parameter: m, zero before the first update"),
        Slot("second_moment", "tensor(float)", "as parameter: v, zero before the first update"),
        Slot("gradient_weight", "tensor(float)", "[]: weight of g in the first moment"),
        Slot("square_weight", "tensor(float)", "[]: weight of g^2 in the second moment"),
        Slot("step_size", "tensor(float)", "[]: how far the parameter moves"),
        Slot("inverse_root", "tensor(float)", "[]: factor of sqrt(v'); when absent, 1", optional=True),
        Slot("decay", "tensor(float)", "[]: factor of the parameter; when absent, 1", optional=True),
        Slot("update", "tensor(bool)", "[]: when false, results are the old values", optional=True),
    ),
    outputs=(
        Slot("parameter_updated", "tensor(float)", "as parameter: p'; may have the memory of parameter"),
        Slot("first_moment_updated", "tensor(float)", "as parameter: m'; may have that of first_moment"),
        Slot("second_moment_updated", "tensor(float)", "as parameter: v'; may have that of second_moment"),
    ),
    attributes=(
        Attribute("form", "pytorch", "pytorch: the parameter decays before it moves; hugging_face: after"),
        Attribute("beta1", 0.9, "decay of the first moment"),
        Attribute("beta2", 0.999, "decay of the second moment"),
        Attribute("epsilon", 1e-8, "added to the root of the second moment"),
    ),
    type_constraints=(),
    body=_body,
    infer=_infer,
    reference=AdamW,
)
