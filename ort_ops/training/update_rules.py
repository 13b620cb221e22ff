"""How a parameter is changed by its gradient: AdamW, Adam, SGD and Lion as settings and as ONNX nodes.

A rule writes the update of one parameter at a time through an `UpdateWriter`, which knows that parameter's
type, learning rate and weight decay. What all parameters have in common (clipping, loss scaling, types
narrower than float32) is in `optimizer.py`. Every new value depends on all readers of the old one, so that
the run time may write it into the old one's memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import onnx_ir as ir

from ort_ops import operators
from ort_ops.training.update_writer import UpdateWriter

FIRST_MOMENT_SUFFIX = "_first_moment"
SECOND_MOMENT_SUFFIX = "_second_moment"
MOMENTUM_SUFFIX = "_momentum"


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """What is different for the parameters whose name matches one of `patterns`.

    patterns: as in file names: `*` any text, `?` one character, case matters.
    learning_rate_scale: the run time's learning rate is multiplied by it.
    weight_decay: instead of the rule's; None leaves that one.
    """

    patterns: Sequence[str]
    learning_rate_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.patterns, str):
            raise ValueError(
                f"ParameterGroup: patterns must be a sequence of patterns; got the text {self.patterns!r}. "
                f"Write [{self.patterns!r}]."
            )
        _check_not_negative("ParameterGroup", "learning_rate_scale", self.learning_rate_scale)
        if self.weight_decay is not None:
            _check_not_negative("ParameterGroup", "weight_decay", self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class UpdateRule(ABC):
    """What every rule has.

    weight_decay: decay of the parameters; each rule says how it is applied.
    no_decay: patterns of parameters without weight decay whatever their group, usually norms and biases.
    groups: parameters with settings of their own; the first group that matches a name counts.
    max_gradient_norm: when given, gradients are scaled so that their L2 norm over all parameters does not
        exceed it, as torch.nn.utils.clip_grad_norm_ does.
    """

    weight_decay: float = 0.0
    no_decay: Sequence[str] = ()
    groups: Sequence[ParameterGroup] = ()
    max_gradient_norm: float | None = None

    def __post_init__(self) -> None:
        who = type(self).__name__
        _check_not_negative(who, "weight_decay", self.weight_decay)
        if isinstance(self.no_decay, str):
            raise ValueError(
                f"{who}: no_decay must be a sequence of patterns; got the text {self.no_decay!r}. "
                f"Write [{self.no_decay!r}]."
            )
        if self.max_gradient_norm is not None and not self.max_gradient_norm > 0.0:
            raise ValueError(f"{who}: max_gradient_norm must be positive; got {self.max_gradient_norm}.")

    @property
    @abstractmethod
    def state_suffixes(self) -> tuple[str, ...]:
        """What is put behind a parameter's name to name its state tensors, each of the parameter's shape and
        zero at first."""

    def update(
        self, write: UpdateWriter, parameter: ir.Value, gradient: ir.Value, state: Sequence[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        """Write the nodes; returns the new parameter and the new state, or the old ones where `write` says
        so."""
        new_parameter, new_state = self._new_values(write, parameter, gradient, state)
        kept = [write.kept(new, old) for new, old in zip(new_state, state, strict=True)]
        return write.kept(new_parameter, parameter), kept

    @abstractmethod
    def _new_values(
        self, write: UpdateWriter, parameter: ir.Value, gradient: ir.Value, state: Sequence[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        """The new parameter and the new state."""


class AdamWForm(Enum):
    """The two published forms of AdamW."""

    PYTORCH = "pytorch"
    """torch.optim.AdamW: decay first, epsilon beside the bias-corrected root."""
    HUGGING_FACE = "hugging_face"
    """transformers' AdamW, and adam_mode=1 of ONNX Runtime's training build: epsilon beside the uncorrected
    root, decay last."""


@dataclass(frozen=True, kw_only=True)
class AdamW(UpdateRule):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2), decay decoupled from the gradient.

    With g the gradient, t the number of this update counted from 1, c1 = 1 - beta1^t and c2 = 1 - beta2^t, or
    both 1 without `bias_correction`:

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2

    PYTORCH:       p = p * (1 - learning_rate * weight_decay)
                   p = p - learning_rate / c1 * m / (sqrt(v / c2) + epsilon)
    HUGGING_FACE:  p = p - learning_rate * sqrt(c2) / c1 * m / (sqrt(v) + epsilon)
                   p = p * (1 - learning_rate * weight_decay)
    """

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    bias_correction: bool = True
    form: AdamWForm = AdamWForm.PYTORCH

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas("AdamW", self.betas)
        _check_not_negative("AdamW", "epsilon", self.epsilon)

    @property
    def state_suffixes(self) -> tuple[str, ...]:
        return (FIRST_MOMENT_SUFFIX, SECOND_MOMENT_SUFFIX)

    def update(
        self, write: UpdateWriter, parameter: ir.Value, gradient: ir.Value, state: Sequence[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        if write.dtype is not ir.DataType.FLOAT:
            return super().update(write, parameter, gradient, state)
        # The plugin's operator does the same in one pass over memory, the decision to skip included.
        first, second = state
        new = write.op.AdamW(
            *(parameter, gradient, first, second, *_moment_weights(write, self.betas)),
            *(self._step_size(write), self._inverse_root(write), _decay(write), write.is_used),
            form=self.form.value,
            beta1=self.betas[0],
            beta2=self.betas[1],
            epsilon=self.epsilon,
            _domain=operators.DOMAIN,
            _version=1,
            _outputs=3,
        )
        return new[0], [new[1], new[2]]

    def _new_values(
        self, write: UpdateWriter, parameter: ir.Value, gradient: ir.Value, state: Sequence[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        op = write.op
        first, second = _moments(write, self.betas, gradient, state)
        move = _adam_move(
            write, first, second, self.epsilon, self._step_size(write), self._inverse_root(write)
        )
        if self.form is AdamWForm.PYTORCH:
            return op.Sub(_decayed(write, parameter), move), [first, second]
        return _decayed(write, op.Sub(parameter, move)), [first, second]

    def _step_size(self, write: UpdateWriter) -> ir.Value:
        if not self.bias_correction:
            return write.learning_rate
        if self.form is AdamWForm.PYTORCH:
            return _adam_step_size(write, self.betas)

        def make() -> ir.Value:
            op = write.op
            ratio = op.Div(
                op.Sqrt(_bias_correction(write, self.betas[1])), _bias_correction(write, self.betas[0])
            )
            return write.cast(op.Mul(write.double(write.learning_rate), ratio))

        return write.shared("step_size", make)

    def _inverse_root(self, write: UpdateWriter) -> ir.Value | None:
        if not self.bias_correction or self.form is AdamWForm.HUGGING_FACE:
            return None
        return _adam_inverse_root(write, self.betas)


@dataclass(frozen=True, kw_only=True)
class Adam(UpdateRule):
    """Adam (Kingma & Ba 2015) as torch.optim.Adam: weight decay is added to the gradient (L2 regularisation).

    g = g + weight_decay * p, then as `AdamW` in PyTorch's form without its decay.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas("Adam", self.betas)
        _check_not_negative("Adam", "epsilon", self.epsilon)

    @property
    def state_suffixes(self) -> tuple[str, ...]:
        return (FIRST_MOMENT_SUFFIX, SECOND_MOMENT_SUFFIX)

    def _new_values(
        self, write: UpdateWriter, parameter: ir.Value, gradient: ir.Value, state: Sequence[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        write, gradient = _with_l2(write, parameter, gradient)
        first, second = _moments(write, self.betas, gradient, state)
        step_size, inverse_root = _adam_step_size(write, self.betas), _adam_inverse_root(write, self.betas)
        move = _adam_move(write, first, second, self.epsilon, step_size, inverse_root)
        return write.op.Sub(parameter, move), [first, second]


@dataclass(frozen=True, kw_only=True)
class SGD(UpdateRule):
    """Gradient descent as torch.optim.SGD computes it.

        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g, at the first update b = g      (with momentum)
        g = g + momentum * b if nesterov, else b                               (with momentum)
        p = p - learning_rate * g

    Sources: Polyak 1964; Sutskever et al. 2013 for Nesterov's form.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_not_negative("SGD", "momentum", self.momentum)
        if self.nesterov and not (self.momentum > 0.0 and self.dampening == 0.0):
            raise ValueError(
                f"SGD: nesterov needs a positive momentum and no dampening; got momentum {self.momentum} and "
                f"dampening {self.dampening}."
            )
        if self.dampening and not self.momentum:
            raise ValueError(
                f"SGD: dampening is a part of momentum; got dampening {self.dampening} without momentum. "
                f"Give momentum too."
            )

    @property
    def state_suffixes(self) -> tuple[str, ...]:
        return (MOMENTUM_SUFFIX,) if self.momentum else ()

    def _new_values(
        self, write: UpdateWriter, parameter: ir.Value, gradient: ir.Value, state: Sequence[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        op = write.op
        write, gradient = _with_l2(write, parameter, gradient)
        if not state:
            step = op.Mul(gradient, write.gradient_weight(write.learning_rate))
            return op.Sub(parameter, step), []
        if self.nesterov:
            gradient = write.scaled(gradient)
            write = write.with_scaled_gradient()
        fresh = op.Mul(gradient, self._gradient_weight(write)) if self._weighs(write) else gradient
        momentum = op.Add(op.Mul(state[0], write.constant(self.momentum)), fresh)
        direction = momentum
        if self.nesterov:
            direction = op.Add(gradient, op.Mul(momentum, write.constant(self.momentum)))
        return op.Sub(parameter, op.Mul(direction, write.learning_rate)), [momentum]

    def _weighs(self, write: UpdateWriter) -> bool:
        return self.dampening != 0.0 or write.gradient_scale is not None

    def _gradient_weight(self, write: UpdateWriter) -> ir.Value:
        """1 - dampening, but 1 at the first update."""
        if not self.dampening:
            return write.gradient_weight(write.constant(1.0))

        def make() -> ir.Value:
            op = write.op
            is_first = op.Equal(write.updates, write.double_constant(1.0))
            weight = op.Where(is_first, write.constant(1.0), write.constant(1.0 - self.dampening))
            return write.gradient_weight(weight)

        return write.shared("gradient_weight", make)


@dataclass(frozen=True, kw_only=True)
class Lion(UpdateRule):
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum, and decoupled decay.

        p = p * (1 - learning_rate * weight_decay) - learning_rate * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    betas: beta1 must not be 0, for beta2 * m is computed from beta1 * m.
    """

    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas("Lion", self.betas)
        if self.betas[0] == 0.0:
            raise ValueError(f"Lion: beta1 must be positive; got betas {self.betas}.")

    @property
    def state_suffixes(self) -> tuple[str, ...]:
        return (FIRST_MOMENT_SUFFIX,)

    def _new_values(
        self, write: UpdateWriter, parameter: ir.Value, gradient: ir.Value, state: Sequence[ir.Value]
    ) -> tuple[ir.Value, list[ir.Value]]:
        op = write.op
        beta1, beta2 = self.betas
        # The old momentum is read once, by a node that both its new value and the parameter's depend on: with
        # a reader for each, the new value could be written over it before the other has read it.
        kept = op.Mul(state[0], write.constant(beta1))
        weight1 = write.shared("weight1", lambda: write.gradient_weight(write.constant(1.0 - beta1)))
        weight2 = write.shared("weight2", lambda: write.gradient_weight(write.constant(1.0 - beta2)))
        direction = op.Sign(op.Add(kept, op.Mul(gradient, weight1)))
        momentum = op.Add(op.Mul(kept, write.constant(beta2 / beta1)), op.Mul(gradient, weight2))
        move = op.Mul(direction, write.learning_rate)
        return op.Sub(_decayed(write, parameter), move), [momentum]


def _moments(
    write: UpdateWriter, betas: tuple[float, float], gradient: ir.Value, state: Sequence[ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Adam's moving averages of the gradient and of its square."""
    op = write.op
    weight1, weight2 = _moment_weights(write, betas)
    first = op.Add(op.Mul(state[0], write.constant(betas[0])), op.Mul(gradient, weight1))
    square = op.Mul(gradient, gradient)
    second = op.Add(op.Mul(state[1], write.constant(betas[1])), op.Mul(square, weight2))
    return first, second


def _moment_weights(write: UpdateWriter, betas: tuple[float, float]) -> tuple[ir.Value, ir.Value]:
    """What the gradient and its square are multiplied by in the moving averages."""

    def square_weight() -> ir.Value:
        weight, scale = write.constant(1.0 - betas[1]), write.gradient_scale
        return weight if scale is None else write.op.Mul(weight, write.op.Mul(scale, scale))

    return (
        write.shared("gradient_weight", lambda: write.gradient_weight(write.constant(1.0 - betas[0]))),
        write.shared("square_weight", square_weight),
    )


def _adam_move(
    write: UpdateWriter,
    first: ir.Value,
    second: ir.Value,
    epsilon: float,
    step_size: ir.Value,
    inverse_root: ir.Value | None,
) -> ir.Value:
    """m / (sqrt(v) * inverse_root + epsilon) * step_size"""
    op = write.op
    root = op.Sqrt(second)
    if inverse_root is not None:
        root = op.Mul(root, inverse_root)
    return op.Mul(op.Div(first, op.Add(root, write.constant(epsilon))), step_size)


def _adam_step_size(write: UpdateWriter, betas: tuple[float, float]) -> ir.Value:
    """learning_rate / (1 - beta1^t)"""
    return write.shared(
        "step_size",
        lambda: write.cast(
            write.op.Div(write.double(write.learning_rate), _bias_correction(write, betas[0]))
        ),
    )


def _adam_inverse_root(write: UpdateWriter, betas: tuple[float, float]) -> ir.Value:
    """1 / sqrt(1 - beta2^t)"""
    op = write.op
    return write.shared(
        "inverse_root", lambda: write.cast(op.Reciprocal(op.Sqrt(_bias_correction(write, betas[1]))))
    )


def _bias_correction(write: UpdateWriter, beta: float) -> ir.Value:
    """1 - beta^t in float64: that of the first steps would lose five digits in float32."""
    op = write.op
    return op.Sub(write.double_constant(1.0), op.Pow(write.double_constant(beta), write.updates))


def _decayed(write: UpdateWriter, parameter: ir.Value) -> ir.Value:
    factor = _decay(write)
    return parameter if factor is None else write.op.Mul(parameter, factor)


def _decay(write: UpdateWriter) -> ir.Value | None:
    """1 - learning_rate * weight_decay"""
    if not write.weight_decay:
        return None
    op = write.op
    return write.shared(
        "decay",
        lambda: op.Sub(write.constant(1.0), op.Mul(write.learning_rate, write.constant(write.weight_decay))),
    )


def _with_l2(write: UpdateWriter, parameter: ir.Value, gradient: ir.Value) -> tuple[UpdateWriter, ir.Value]:
    """The gradient plus weight_decay * p, and a writer that does not scale it again."""
    if not write.weight_decay:
        return write, gradient
    op = write.op
    decay = op.Mul(parameter, write.constant(write.weight_decay))
    return write.with_scaled_gradient(), op.Add(write.scaled(gradient), decay)


def _check_betas(who: str, betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{who}: betas must be two numbers in [0, 1); got {betas}.")


def _check_not_negative(who: str, name: str, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{who}: {name} must be a number that is not negative; got {value}.")
