"""Derivatives of LSTM, GRU and RNN.

What the gates were at every step follows from the hidden states, which are the node's own output Y: all steps
are worked out at once, by matrix products. Only what truly depends on the step after it runs step by step, in
one Scan over the reversed
sequence: the gradient of the state. The gradients of the weights are then matrix products over all steps
again.

Each direction is handled on its own, as a forward one: the reverse direction by reversing the time axis of
what it reads. Layout 1 does not come here (passes/time_first.py). Shapes in comments: T steps, N batch, H
hidden size, I input size, G gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ort_ops.gradient.driver import Vjp
from ort_ops.gradient.emitter import Emitter
from ort_ops.gradient.registry import Grads, vjp

_LIMITS = "default activations, no clip or input_forget"


class _Direction:
    """One direction of a recurrent node, as if it were a forward one, and what all three operators share.

    Attributes:
        x: [T, N, I]; w: [G*H, I]; r: [G*H, H]; bias_w, bias_r: [G*H] each or None.
        hidden: h after each step, [T, N, H]; before: h before each step.
        dhidden: the gradient of h after each step by the outputs Y and Y_h.
        alive: [T, N, 1], 1.0 where the step is within the sequence's length; None if all are.
    """

    def __init__(self, c: Vjp, number: int, gates: int) -> None:
        self.c = c
        self.reverse = number == 1 or c.str_attr("direction", "forward") == "reverse"
        self.number = number
        self.gates = gates
        self.lengths = c.optional(4)
        self.x = self.in_time(c.x(0))
        self.w, self.r = self.slot(c.x(1)), self.slot(c.x(2))
        self.bias_w = self.bias_r = None
        if c.has(3):
            halves = c.multi("Split", self.slot(c.x(3)), num_outputs=2, axis=0, outputs=2)
            self.bias_w, self.bias_r = halves
        self.steps, batch = c.dim(c.x(0), 0), c.dim(c.x(0), 1)
        self.hidden_size = c.dim(c.x(2), 2)
        zeros = c.op("ConstantOfShape", c.join(batch, self.hidden_size), value=c.emit.zero(c.dtype))
        self.start = self.slot(c.x(5)) if c.has(5) else zeros
        self.alive = self._alive()
        self.hidden = self.in_time(self.slot(c.y(0), axis=1))
        self.before = self.shifted(self.hidden, self.start)
        self.dhidden = self._output_gradient()

    def slot(self, value: ir.Value, axis: int = 0) -> ir.Value:
        """This direction's part of a tensor that has one for each along `axis`."""
        return self.c.op("Gather", value, self.c.emit.constant(np.array(self.number)), axis=axis)

    def peepholes(self) -> tuple[ir.Value, ...]:
        """LSTM's weights from the cell to the gates i, o and f, [H] each; none if it has none."""
        c = self.c
        return c.multi("Split", self.slot(c.x(7)), num_outputs=3, axis=0, outputs=3) if c.has(7) else ()

    def in_time(self, value: ir.Value) -> ir.Value:
        """A [T, N, ...] tensor in the order in which this direction reads it; applied twice it is back in
        order."""
        if not self.reverse:
            return value
        if self.lengths is not None:
            lengths = self.c.cast(self.lengths, ir.DataType.INT64)
            return self.c.op("ReverseSequence", value, lengths, time_axis=0, batch_axis=1)
        return _reversed(self.c, value)

    def shifted(self, after: ir.Value, start: ir.Value) -> ir.Value:
        """The state before each step, given that after each step and at the start."""
        c = self.c
        return c.op("Concat", c.op("Unsqueeze", start, [0]), c.op("Slice", after, [0], [-1], [0]), axis=0)

    def _alive(self) -> ir.Value | None:
        if self.lengths is None:
            return None
        c = self.c
        zero, one = (c.emit.constant(np.array(number)) for number in (0, 1))
        times = c.op("Unsqueeze", c.op("Range", zero, c.op("Squeeze", self.steps), one), [1])
        inside = c.op("Less", times, c.cast(self.lengths, ir.DataType.INT64))
        return c.op("Unsqueeze", c.cast(inside, c.dtype), [2])

    def _output_gradient(self) -> ir.Value:
        """Y's gradient, with that of the last state added at the last step within the length."""
        c = self.c
        gradient = self.in_time(self.slot(c.dy(0), axis=1))
        if not c.has_dy(1):
            return gradient if self.alive is None else c.op("Mul", gradient, self.alive)
        return self.add_at_end(gradient, self.slot(c.dy(1)))

    def add_at_end(self, gradient: ir.Value, last: ir.Value) -> ir.Value:
        """`gradient`, [T, N, H], with `last`, [N, H], added at each sequence's last step."""
        c = self.c
        last = c.op("Unsqueeze", last, [0])
        if self.alive is None:
            ends = c.op("Pad", last, c.join(c.sub(self.steps, [1]), [0]), None, [0])
            return c.op("Add", gradient, ends)
        next_alive = c.op(
            "Pad", c.op("Slice", self.alive, [1], [np.iinfo(np.int64).max], [0]), [0, 1], None, [0]
        )
        is_last = c.op("Sub", self.alive, next_alive)
        return c.op("Add", c.op("Mul", gradient, self.alive), c.op("Mul", is_last, last))

    def from_input(self) -> ir.Value:
        """x W' + bias_w, [T, N, G*H]."""
        return self._affine(self.x, self.w, self.bias_w)

    def from_state(self) -> ir.Value:
        """h R' + bias_r, with h before each step, [T, N, G*H]."""
        return self._affine(self.before, self.r, self.bias_r)

    def _affine(self, value: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
        c = self.c
        product = c.op("MatMul", value, c.op("Transpose", weight, perm=[1, 0]))
        return product if bias is None else c.op("Add", product, bias)

    def split_gates(self, value: ir.Value, axis: int = 2) -> tuple[ir.Value, ...]:
        return self.c.multi("Split", value, num_outputs=self.gates, axis=axis, outputs=self.gates)

    def over_steps(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """left' right summed over steps and batch: [T, N, A], [T, N, B] to [A, B]."""
        c = self.c
        flat = []
        for value in (left, right):
            last = c.op("Gather", c.op("Shape", value), [2], axis=0)
            flat.append(c.op("Reshape", value, c.join([-1], last)))
        return c.op("Gemm", *flat, transA=1)

    def sum_steps(self, value: ir.Value) -> ir.Value:
        return self.c.op("ReduceSum", value, [0, 1], keepdims=0)

    def finish(self, d_input: ir.Value, d_state: ir.Value, d_start: ir.Value) -> dict[int, ir.Value]:
        """Gradients of this direction's inputs, given those of `from_input`, `from_state` and the state at
        the start."""
        c = self.c
        gradients = {
            0: self.in_time(c.op("MatMul", d_input, self.w)),
            1: self.over_steps(d_input, self.x),
            2: self.over_steps(d_state, self.before),
            5: d_start,
        }
        if self.bias_w is not None:
            gradients[3] = c.op("Concat", self.sum_steps(d_input), self.sum_steps(d_state), axis=0)
        return gradients


def _reversed(c: Vjp, value: ir.Value) -> ir.Value:
    """`value` with its first axis reversed."""
    return c.op("Slice", value, [-1], [np.iinfo(np.int64).min], [0], [-1])


Step = Callable[
    [Emitter, Sequence[ir.Value], Sequence[ir.Value]], tuple[Sequence[ir.Value], Sequence[ir.Value]]
]


def _scan(
    c: Vjp,
    states: Sequence[ir.Value],
    sequences: Sequence[ir.Value],
    step: Step,
    results: int,
    backwards: bool,
) -> tuple[ir.Value, ...]:
    """A Scan over the steps, from the first to the last or backwards.

    Args:
        states: values before the first step of the scan.
        sequences: [T, ...] each; step t gets element t of each.
        step: writes the body: of (emitter, states, elements) makes (states, results of this step).
        results: how many results a step has.

    Returns:
        The states after the scan, then the results, [T, ...] each.
    """
    emit = Emitter(c.emit.names, c.emit.opset)
    emit.prefix = f"{c.emit.prefix}/step"
    inner = [
        ir.Value(name=c.emit.names.numbered(f"{c.emit.prefix}/step_in"), type=ir.TensorType(c.dtype))
        for _ in (*states, *sequences)
    ]
    out_states, out_results = step(emit, inner[: len(states)], inner[len(states) :])
    outputs = [emit.fresh_copy(value) for value in (*out_states, *out_results)]
    body = ir.Graph(
        inner, outputs, nodes=emit.nodes, initializers=emit.constants, name=f"{c.emit.prefix}_step"
    )
    return c.multi(
        "Scan", *states, *sequences, outputs=len(outputs), dtype=c.dtype, body=body,
        num_scan_inputs=len(sequences), scan_input_directions=[int(backwards)] * len(sequences),
        scan_output_directions=[int(backwards)] * results,
    )  # fmt: skip


def _check(c: Vjp, activations: Sequence[str]) -> int:
    """Refuse what is not supported; returns the number of directions."""
    given = c.node.attributes.get("activations")
    directions = 2 if c.str_attr("direction", "forward") == "bidirectional" else 1
    named = [name.lower() for name in given.as_strings()] if given is not None else []
    if named and named != [name.lower() for name in activations] * directions:
        raise c.fail(f"only the activations {', '.join(activations)} are supported; got {', '.join(named)}")
    for attribute in ("clip", "input_forget"):
        if attribute in c.node.attributes and c.node.attributes[attribute].value:
            raise c.fail(f"the attribute {attribute} is not supported; leave it out")
    return directions


def _join_directions(c: Vjp, parts: Sequence[dict[int, ir.Value]]) -> Grads:
    """Weights and states of the directions side by side; the input's gradient is the sum."""
    gradients: list[ir.Value | None] = [None] * len(c.node.inputs)
    for index in parts[0]:
        if not c.wants(index):
            continue
        values = [part[index] for part in parts]
        if index == 0:
            gradients[0] = values[0] if len(values) == 1 else c.op("Add", *values)
        else:
            rows = [c.op("Unsqueeze", value, [0]) for value in values]
            gradients[index] = rows[0] if len(rows) == 1 else c.op("Concat", *rows, axis=0)
    return gradients


@vjp("RNN", inputs=(0, 1, 2, 3, 5), limits=_LIMITS + "; activation Tanh or Relu")
def rnn(c: Vjp) -> Grads:
    """h = f(x W' + h R' + b)."""
    given = c.node.attributes.get("activations")
    relu = given is not None and given.as_strings()[0].lower() == "relu"
    parts = []
    for number in range(_check(c, ["Relu" if relu else "Tanh"])):
        d = _Direction(c, number, 1)
        h = d.hidden
        if relu:
            slope = c.cast(c.op("Greater", h, 0.0), c.dtype)
        else:
            slope = c.op("Sub", 1.0, c.op("Mul", h, h))
        slope, hold = _held(c, d, slope)

        def step(
            e: Emitter, states: Sequence[ir.Value], parts: Sequence[ir.Value], r: ir.Value = d.r
        ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
            dh = e.op("Add", states[0], parts[0])
            dz = e.op("Mul", dh, parts[1])
            back = e.op("MatMul", dz, r)
            return [_pass(e, back, dh, parts, 2)], [dz]

        d_start, dz = _scan(c, [c.zeros_like(d.start)], [d.dhidden, slope, *hold], step, 1, backwards=True)
        parts.append(d.finish(dz, dz, d_start))
    return _join_directions(c, parts)


def _held(c: Vjp, d: _Direction, slope: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
    """Beyond a sequence's end the state is passed on as it is: no slope, and the gradient goes through."""
    if d.alive is None:
        return slope, []
    return c.op("Mul", slope, d.alive), [c.op("Sub", 1.0, d.alive)]


def _pass(e: Emitter, back: ir.Value, gradient: ir.Value, parts: Sequence[ir.Value], hold: int) -> ir.Value:
    """The state's gradient before the step: `back`, and beyond the end all of `gradient`."""
    return back if len(parts) <= hold else e.op("Add", back, e.op("Mul", gradient, parts[hold]))


@vjp("LSTM", inputs=(0, 1, 2, 3, 5, 6, 7), limits=_LIMITS)
def lstm(c: Vjp) -> Grads:
    """i, f = sigmoid(... + p c_before), o = sigmoid(... + p c), g = tanh(...); c = f c_before + i g; h = o
    tanh(c). The cells follow from the gates' other parts."""
    parts = []
    for number in range(_check(c, ["Sigmoid", "Tanh", "Tanh"])):
        d = _Direction(c, number, 4)
        start = d.slot(c.x(6)) if c.has(6) else c.zeros_like(d.start)
        peepholes = d.peepholes()
        into_i, into_o, into_f, into_g = d.split_gates(c.op("Add", d.from_input(), d.from_state()))
        g = c.op("Tanh", into_g)
        cell = _cells(c, d, start, into_i, into_f, g, peepholes)
        before = d.shifted(cell, start)
        i, o, f = (
            c.op("Sigmoid", _peeped(c.emit, *gate))
            for gate in zip(
                (into_i, into_o, into_f), (before, cell, before), peepholes or (None,) * 3, strict=True
            )
        )
        squashed = c.op("Tanh", cell)
        # the derivative of h by c, and of c and h by what goes into the gates
        cell_slope = c.op("Mul", o, c.op("Sub", 1.0, c.op("Mul", squashed, squashed)))
        slopes = [
            c.op("Mul", g, _sigmoid_slope(c, i)),
            c.op("Mul", squashed, _sigmoid_slope(c, o)),
            c.op("Mul", before, _sigmoid_slope(c, f)),
            c.op("Mul", i, c.op("Sub", 1.0, c.op("Mul", g, g))),
        ]
        # the derivative of c by c before
        keep = f
        if peepholes:
            cell_slope = c.op("Add", cell_slope, c.op("Mul", slopes[1], peepholes[1]))
            through_gates = (c.op("Mul", slopes[gate], peepholes[gate]) for gate in (0, 2))
            keep = c.op("Sum", f, *through_gates)
        hold = []
        if d.alive is not None:
            hold = [c.op("Sub", 1.0, d.alive)]
            cell_slope = c.op("Mul", cell_slope, d.alive)
            slopes = [c.op("Mul", slope, d.alive) for slope in slopes]
            keep = c.op("Add", c.op("Mul", keep, d.alive), hold[0])
        dcell = c.zeros_like(cell)
        if c.has_dy(2):
            dcell = d.add_at_end(dcell, d.slot(c.dy(2)))

        def step(
            e: Emitter, states: Sequence[ir.Value], parts: Sequence[ir.Value], r: ir.Value = d.r
        ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
            dh = e.op("Add", states[0], parts[0])
            dc = e.op("Add", e.op("Add", states[1], parts[1]), e.op("Mul", dh, parts[2]))
            sources = [dc, dh, dc, dc]
            dz = e.op(
                "Concat", *(e.op("Mul", s, p) for s, p in zip(sources, parts[4:8], strict=True)), axis=1
            )
            back = _pass(e, e.op("MatMul", dz, r), dh, parts, 8)
            return [back, e.op("Mul", dc, parts[3])], [dz]

        zero = c.zeros_like(d.start)
        d_start, d_cell_start, dz = _scan(
            c, [zero, zero], [d.dhidden, dcell, cell_slope, keep, *slopes, *hold], step, 1, backwards=True
        )
        gradients = d.finish(dz, dz, d_start)
        gradients[6] = d_cell_start
        if peepholes:
            d_gates = zip(d.split_gates(dz)[:3], (before, cell, before), strict=True)
            sums = [d.sum_steps(c.op("Mul", d_gate, seen)) for d_gate, seen in d_gates]
            gradients[7] = c.op("Concat", *sums, axis=0)
        parts.append(gradients)
    return _join_directions(c, parts)


def _sigmoid_slope(c: Vjp, gate: ir.Value) -> ir.Value:
    return c.op("Mul", gate, c.op("Sub", 1.0, gate))


def _peeped(e: Emitter, gate: ir.Value, cell: ir.Value, peephole: ir.Value | None) -> ir.Value:
    return gate if peephole is None else e.op("Add", gate, e.op("Mul", cell, peephole))


def _cells(
    c: Vjp,
    d: _Direction,
    start: ir.Value,
    into_i: ir.Value,
    into_f: ir.Value,
    g: ir.Value,
    peepholes: Sequence[ir.Value],
) -> ir.Value:
    """c = f c_before + i g after each step, [T, N, H]; beyond a sequence's end it is passed on as it is.

    Without peepholes the gates of all steps are known before the first.
    """

    def step_of_known_gates(
        e: Emitter, states: Sequence[ir.Value], parts: Sequence[ir.Value]
    ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
        cell = e.op("Add", e.op("Mul", states[0], parts[0]), parts[1])
        return [cell], [cell]

    def step(
        e: Emitter, states: Sequence[ir.Value], parts: Sequence[ir.Value]
    ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
        before = states[0]
        i = e.op("Sigmoid", _peeped(e, parts[0], before, peepholes[0]))
        f = e.op("Sigmoid", _peeped(e, parts[1], before, peepholes[2]))
        cell = e.op("Add", e.op("Mul", f, before), e.op("Mul", i, parts[2]))
        if d.alive is not None:
            cell = e.op("Add", before, e.op("Mul", parts[3], e.op("Sub", cell, before)))
        return [cell], [cell]

    if peepholes:
        alive = [] if d.alive is None else [d.alive]
        return _scan(c, [start], [into_i, into_f, g, *alive], step, 1, backwards=False)[1]
    i, f = c.op("Sigmoid", into_i), c.op("Sigmoid", into_f)
    if d.alive is not None:
        i = c.op("Mul", i, d.alive)
        f = c.op("Add", c.op("Mul", f, d.alive), c.op("Sub", 1.0, d.alive))
    return _scan(c, [start], [f, c.op("Mul", i, g)], step_of_known_gates, 1, backwards=False)[1]


@vjp("GRU", inputs=(0, 1, 2, 3, 5), limits=_LIMITS)
def gru(c: Vjp) -> Grads:
    """z, r = sigmoid(...); n = tanh(x W' + r (h R' + b)) or tanh(x W' + (r h) R' + b); h = (1 - z) n + z
    h_before."""
    parts = []
    for number in range(_check(c, ["Sigmoid", "Tanh"])):
        d = _Direction(c, number, 3)
        after = bool(c.int_attr("linear_before_reset", 0))
        inputs = d.split_gates(d.from_input())
        states = d.split_gates(d.from_state())
        z = c.op("Sigmoid", c.op("Add", inputs[0], states[0]))
        r = c.op("Sigmoid", c.op("Add", inputs[1], states[1]))
        weights = d.split_gates(d.r, axis=0)
        reset_state = c.op("Mul", r, d.before)
        if after:
            from_state = c.op("Mul", r, states[2])
        else:
            from_state = c.op("MatMul", reset_state, c.op("Transpose", weights[2], perm=[1, 0]))
            if d.bias_r is not None:
                from_state = c.op(
                    "Add", from_state, c.multi("Split", d.bias_r, num_outputs=3, axis=0, outputs=3)[2]
                )
        n = c.op("Tanh", c.op("Add", inputs[2], from_state))
        # derivatives of h by what goes into z and n, and of what goes into n by what goes into r
        z_slope = c.op("Mul", c.op("Sub", d.before, n), _sigmoid_slope(c, z))
        n_slope = c.op("Mul", c.op("Sub", 1.0, z), c.op("Sub", 1.0, c.op("Mul", n, n)))
        r_slope = c.op("Mul", states[2] if after else d.before, _sigmoid_slope(c, r))
        hold = []
        if d.alive is not None:
            hold = [c.op("Sub", 1.0, d.alive)]
            z_slope, n_slope = c.op("Mul", z_slope, d.alive), c.op("Mul", n_slope, d.alive)
            z = c.op("Mul", z, d.alive)
        zr = c.op("Concat", weights[0], weights[1], axis=0)

        def step(
            e: Emitter,
            states: Sequence[ir.Value],
            parts: Sequence[ir.Value],
            zr: ir.Value = zr,
            rn: ir.Value = weights[2],
            after: bool = after,
        ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
            dh = e.op("Add", states[0], parts[0])
            dz, dn = e.op("Mul", dh, parts[1]), e.op("Mul", dh, parts[2])
            reset, r_slope, keep = parts[3], parts[4], parts[5]
            if after:
                dr = e.op("Mul", dn, r_slope)
                direct = e.op("MatMul", e.op("Mul", dn, reset), rn)
            else:
                d_reset_state = e.op("MatMul", dn, rn)
                dr = e.op("Mul", d_reset_state, r_slope)
                direct = e.op("Mul", d_reset_state, reset)
            back = e.op("Add", e.op("MatMul", e.op("Concat", dz, dr, axis=1), zr), direct)
            back = e.op("Add", back, e.op("Mul", dh, keep))
            return [_pass(e, back, dh, parts, 6)], [dz, dr, dn]

        start = c.zeros_like(d.start)
        d_start, dz, dr, dn = _scan(
            c, [start], [d.dhidden, z_slope, n_slope, r, r_slope, z, *hold], step, 3, backwards=True
        )
        d_input = c.op("Concat", dz, dr, dn, axis=2)
        if after:
            d_state = c.op("Concat", dz, dr, c.op("Mul", dn, r), axis=2)
            gradients = d.finish(d_input, d_state, d_start)
        else:
            gradients = d.finish(d_input, d_input, d_start)
            rows = c.op(
                "Concat",
                d.over_steps(c.op("Concat", dz, dr, axis=2), d.before),
                d.over_steps(dn, reset_state),
                axis=0,
            )
            gradients[2] = rows
        parts.append(gradients)
    return _join_directions(c, parts)
