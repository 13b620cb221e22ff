"""What an update rule needs to write the nodes of one parameter: its settings, and the scalars that are
written once for all parameters alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import onnx_ir as ir
from onnxscript import OpBuilder


class UpdateWriter:
    """What a rule needs to write the update of one parameter. Scalars that several parameters share are
    written once.

    op: writes nodes.
    dtype: type that the update is computed in, FLOAT or DOUBLE; parameter, gradient and state have it.
    updates: number of this update counted from 1, DOUBLE [].
    gradient_scale: what the gradient must still be multiplied by, of `dtype` []; None means by nothing.
    weight_decay: the parameter's.
    is_used: BOOL [], whether the update is not skipped; None means that none is.
    """

    def __init__(
        self,
        op: OpBuilder,
        written: dict[Hashable, ir.Value],
        *,
        dtype: ir.DataType,
        learning_rate: ir.Value,
        learning_rate_scale: float,
        weight_decay: float,
        updates: ir.Value,
        gradient_scale: ir.Value | None,
        is_used: ir.Value | None,
    ) -> None:
        self.op = op
        self.dtype = dtype
        self.updates = updates
        self.weight_decay = weight_decay
        self.is_used = is_used
        self._written = written
        self._run_time_rate = learning_rate
        self._rate_scale = learning_rate_scale
        self._gradient_scale = gradient_scale

    def with_scaled_gradient(self) -> UpdateWriter:
        """The same for a gradient that has been multiplied by `gradient_scale` already."""
        return UpdateWriter(
            self.op,
            self._written,
            dtype=self.dtype,
            learning_rate=self._run_time_rate,
            learning_rate_scale=self._rate_scale,
            weight_decay=self.weight_decay,
            updates=self.updates,
            gradient_scale=None,
            is_used=self.is_used,
        )

    def kept(self, new: ir.Value, old: ir.Value) -> ir.Value:
        """`new`, or `old` when the update is skipped."""
        return new if self.is_used is None else self.op.Where(self.is_used, new, old)

    def shared(self, name: str, make: Callable[[], ir.Value]) -> ir.Value:
        """The scalar `name`: what `make` wrote for the first parameter with the same settings."""
        key = (name, self.dtype, self._rate_scale, self.weight_decay, self._gradient_scale is None)
        if key not in self._written:
            self._written[key] = make()
        return self._written[key]

    def constant(self, value: float) -> ir.Value:
        """A scalar of `dtype`."""
        return self._constant(value, self.dtype)

    def double_constant(self, value: float) -> ir.Value:
        return self._constant(value, ir.DataType.DOUBLE)

    def _constant(self, value: float, dtype: ir.DataType) -> ir.Value:
        key = (value, dtype)
        if key not in self._written:
            self._written[key] = self.op.Constant(value=ir.tensor(value, dtype=dtype))
        return self._written[key]

    def cast(self, value: ir.Value) -> ir.Value:
        """A DOUBLE value in `dtype`."""
        return value if self.dtype is ir.DataType.DOUBLE else self.op.Cast(value, to=self.dtype)

    def double(self, value: ir.Value) -> ir.Value:
        """A value of `dtype` in DOUBLE."""
        return value if self.dtype is ir.DataType.DOUBLE else self.op.Cast(value, to=ir.DataType.DOUBLE)

    @property
    def learning_rate(self) -> ir.Value:
        """The parameter's, of `dtype` []."""

        def make() -> ir.Value:
            rate = self._run_time_rate
            if self.dtype is not ir.DataType.FLOAT:
                rate = self.op.Cast(rate, to=self.dtype)
            return rate if self._rate_scale == 1.0 else self.op.Mul(rate, self.constant(self._rate_scale))

        return self.shared("learning_rate", make)

    @property
    def gradient_scale(self) -> ir.Value | None:
        if self._gradient_scale is None or self.dtype is ir.DataType.FLOAT:
            return self._gradient_scale
        scale = self._gradient_scale
        return self.shared("gradient_scale", lambda: self.op.Cast(scale, to=self.dtype))

    def gradient_weight(self, weight: ir.Value) -> ir.Value:
        """`weight * gradient_scale`: scaling a weight saves a pass over the gradient."""
        scale = self.gradient_scale
        return weight if scale is None else self.op.Mul(weight, scale)

    def scaled(self, gradient: ir.Value) -> ir.Value:
        scale = self.gradient_scale
        return gradient if scale is None else self.op.Mul(gradient, scale)
