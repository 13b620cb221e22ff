"""The table of single-operator cases; `finite_differences.py` runs it.

Random inputs keep away from points where the operator has a kink or a pole, so that central differences mean
something.
"""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from finite_differences import Case


def f(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    """Uniform float64 numbers whose differences and distances from 0 are larger than any step of a
    difference."""
    key = zlib.crc32(repr((shape, low, high, seed)).encode())
    generator = np.random.default_rng(key)
    count = int(np.prod(shape))
    grid = (np.arange(count) + generator.uniform(0.2, 0.8, count)) / max(count, 1)
    return generator.permutation(low + (high - low) * grid).reshape(shape)


def i(*values: object) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def b(*values: object) -> np.ndarray:
    return np.array(values, dtype=bool)


CASES: dict[str, Case] = {}


FORM = {"constants", "outputs", "opset", "dynamic", "static", "linear", "single", "reference", "domains"}


def case(name: str, text: str, **fields: Any) -> None:
    """Add a case: the fields of `Case` by name, everything else is an input."""
    assert name not in CASES, name
    form = {key: value for key, value in fields.items() if key in FORM}
    CASES[name] = Case(text, {key: value for key, value in fields.items() if key not in FORM}, **form)


# -- functions of one variable -------------------------------------------------------------------------------

for op, low, high in [
    ("Abs", -2, 2), ("Neg", -2, 2), ("Sqrt", 0.5, 3), ("Reciprocal", 0.5, 3), ("Exp", -2, 2), ("Log", 0.5, 3), ("Erf", -2, 2),
    ("Tanh", -2, 2), ("Sigmoid", -2, 2), ("Sin", -2, 2), ("Cos", -2, 2), ("Tan", -1, 1), ("Asin", -0.9, 0.9),
    ("Acos", -0.9, 0.9), ("Atan", -2, 2), ("Sinh", -2, 2), ("Cosh", -2, 2), ("Asinh", -2, 2), ("Acosh", 1.5, 3),
    ("Atanh", -0.9, 0.9), ("Floor", -2, 2), ("Ceil", -2, 2), ("Round", -2, 2), ("Sign", -2, 2), ("Identity", -2, 2),
    ("Relu", -2, 2), ("LeakyRelu", -2, 2), ("Elu", -2, 2), ("Celu", -2, 2), ("Selu", -2, 2), ("Softplus", -2, 2),
    ("Softsign", -2, 2), ("HardSigmoid", -4, 4), ("HardSwish", -5, 5), ("ThresholdedRelu", -2, 2), ("Shrink", -2, 2),
    ("Softmax", -2, 2), ("LogSoftmax", -2, 2), ("Hardmax", -2, 2),
]:  # fmt: skip
    case(op, f"y = {op}(x)", x=f(3, 4, low=low, high=high), reference=op == "Shrink", single=op == "Celu")
case("Mish", "y = Mish(x)", x=f(3, 4))
case("Gelu-erf", "y = Gelu(x)", opset=20, x=f(3, 4), reference=True)
case("Gelu-tanh", 'y = Gelu<approximate="tanh">(x)', opset=20, x=f(3, 4))
case("Swish", "y = Swish<alpha=1.5>(x)", opset=24, x=f(3, 4))
case("LeakyRelu-alpha", "y = LeakyRelu<alpha=0.3>(x)", x=f(3, 4))
case("Elu-alpha", "y = Elu<alpha=0.7>(x)", x=f(3, 4))
case("Celu-alpha", "y = Celu<alpha=1.7>(x)", x=f(3, 4), single=True)
case("Selu-attributes", "y = Selu<alpha=1.2, gamma=0.8>(x)", x=f(3, 4))
case("HardSigmoid-attributes", "y = HardSigmoid<alpha=0.5, beta=0.6>(x)", x=f(3, 4))
case("ThresholdedRelu-alpha", "y = ThresholdedRelu<alpha=0.5>(x)", x=f(3, 4))
case("Shrink-attributes", "y = Shrink<lambd=0.7, bias=0.3>(x)", x=f(3, 4), reference=True)
case("PRelu", "y = PRelu(x, s)", x=f(2, 3, 4), s=f(3, 1, seed=1))
for axis in (0, 1, -1):
    case(f"Softmax-13-axis{axis}", f"y = Softmax<axis={axis}>(x)", opset=13, x=f(2, 3, 4))
    case(f"LogSoftmax-13-axis{axis}", f"y = LogSoftmax<axis={axis}>(x)", opset=13, x=f(2, 3, 4))
    case(f"Softmax-11-axis{axis}", f"y = Softmax<axis={axis}>(x)", opset=11, x=f(2, 3, 4))
    case(f"LogSoftmax-11-axis{axis}", f"y = LogSoftmax<axis={axis}>(x)", opset=11, x=f(2, 3, 4))
case("Softmax-11-default", "y = Softmax(x)", opset=11, x=f(2, 3, 4))
case("Softmax-11-axis2", "y = Softmax<axis=2>(x)", opset=11, x=f(2, 3, 4, 2))

# -- two and more operands, broadcast every way --------------------------------------------------------------

PATTERNS = {
    "same": ((2, 3), (2, 3)), "row": ((2, 3), (3,)), "column": ((2, 3), (2, 1)), "left-row": ((3,), (2, 3)),
    "scalar": ((2, 3), ()), "one": ((2, 3), (1,)), "both": ((2, 1, 3), (1, 4, 3)), "outer": ((4, 1), (3,)),
    "more-ones": ((3,), (1, 1, 3)), "ones": ((1, 1), (1,)),
}  # fmt: skip
for label, (left, right) in PATTERNS.items():
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean"):
        case(f"{op}-{label}", f"y = {op}(a, b)", a=f(*left), b=f(*right, low=0.6, high=1.9, seed=1))
    case(f"Pow-{label}", "y = Pow(a, b)", a=f(*left, low=0.5, high=2.0), b=f(*right, seed=1))
    case(f"PRelu-{label}", "y = PRelu(a, b)", a=f(2, 4, 3), b=f(*right, seed=1)) if label in (
        "row",
        "scalar",
        "one",
    ) else None
    case(
        f"Where-{label}", "y = Where(c, a, b)", a=f(*left), b=f(*right, seed=1),
        c=np.arange(int(np.prod(np.broadcast_shapes(left, right)))).reshape(np.broadcast_shapes(left, right)) % 3 == 0,
    )  # fmt: skip
case("Where-condition-broadcast", "y = Where(c, a, b)", a=f(3), b=f(2, 3), c=b([True], [False]))
case("Add-same-tensor", "y = Add(a, a)", a=f(2, 3))
case("Mul-same-tensor", "y = Mul(a, a)", a=f(2, 3))
case("Sum-single", "y = Sum(a)", a=f(2, 3))
case("Sum-three", "y = Sum(a, b, a)", a=f(2, 3), b=f(3))
case("Mean-three", "y = Mean(a, b, c)", a=f(2, 3), b=f(3), c=f(2, 1))
case("Max-three", "y = Max(a, b, c)", a=f(2, 3), b=f(3, seed=1), c=f(2, 1, seed=2))
case("Min-single", "y = Min(a)", a=f(2, 3))
case("Mod-fmod", "y = Mod<fmod=1>(a, b)", a=f(2, 3, low=-7, high=7), b=f(3, low=1.3, high=2.9))
case("Pow-integer-exponent", "y = Pow(a, b)", a=f(2, 3), b=i(3))
for exponent in (0.0, 0.5, 1.0, 2.0, 3.0, -1.5):
    low = 0.5 if exponent % 1 else -2.0
    case(f"Pow-constant-{exponent}", "y = Pow(a, e)", a=f(2, 3, low=low), constants={"e": np.array(exponent)})
case("Pow-negative-base", "y = Pow(a, e)", a=f(2, 3), constants={"e": np.array([2.0, 3.0, 4.0])})
case("Clip", "y = Clip(x, low, high)", x=f(3, 4), low=np.array(-0.71), high=np.array(0.93))
case("Clip-low", "y = Clip(x, low)", x=f(3, 4), low=np.array(-0.71))
case("Clip-high", "y = Clip(x, , high)", x=f(3, 4), high=np.array(0.93))
case("Clip-crossed", "y = Clip(x, low, high)", x=f(3, 4), low=np.array(0.93), high=np.array(-0.71))
case("Clip-none", "y = Clip(x)", x=f(3, 4))
case("Clip-6", "y = Clip<min=-0.7, max=0.9>(x)", opset=6, x=f(3, 4), dynamic=False)
case("Clip-6-min", "y = Clip<min=0.1>(x)", opset=10, x=f(3, 4))
case("CastLike", "y = CastLike(x, x)", x=f(2, 3))
case("Expand", "y = Expand(x, s)", x=f(3, 1), constants={"s": i(2, 3, 4)})
case("Expand-smaller", "y = Expand(x, s)", x=f(2, 3, 4), constants={"s": i(1, 4)})
case("Expand-computed", "s = Shape(z)\n y = Expand(x, s)", x=f(3, 1), z=np.zeros((2, 3, 4), np.int64))
case("Dropout-inference", "y = Dropout(x)", x=f(2, 3))
case("Dropout-inference-7", "y = Dropout<ratio=0.3>(x)", opset=7, x=f(2, 3))
case("Dropout-inference-10", "y, m = Dropout<ratio=0.3>(x)", opset=10, x=f(2, 3))
case(
    "Dropout-training-false",
    "y, m = Dropout(x, r, t)",
    x=f(2, 3),
    constants={"r": np.array(0.5), "t": np.array(False)},
)
case(
    "Dropout-training-ratio-0",
    "y, m = Dropout(x, r, t)",
    x=f(2, 3),
    constants={"r": np.array(0.0), "t": np.array(True)},
)

# -- reductions ----------------------------------------------------------------------------------------------

REDUCTIONS = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"]
for kind in REDUCTIONS:
    op, x = f"Reduce{kind}", f(2, 3, 4, low=0.4, high=2.0)
    for keep in (0, 1):
        case(f"{op}-18-keep{keep}", f"y = {op}<keepdims={keep}>(x, a)", x=x, constants={"a": i(-1, 0)})
        case(f"{op}-18-all-keep{keep}", f"y = {op}<keepdims={keep}>(x)", x=x)
        case(f"{op}-18-given-axes-keep{keep}", f"y = {op}<keepdims={keep}>(x, a)", x=x, a=i(1, -1))
        for opset in (11, 13):
            if op == "ReduceSum" and opset == 13:
                continue
            case(f"{op}-{opset}-keep{keep}", f"y = {op}<axes=[1, -1], keepdims={keep}>(x)", opset=opset, x=x)
    case(f"{op}-11-all", f"y = {op}(x)", opset=11, x=x)
    case(f"{op}-18-empty-axes", f"y = {op}(x, a)", x=x, constants={"a": np.zeros(0, np.int64)})
for kind in ("Sum", "Mean", "Max", "Min", "Prod"):
    case(f"Reduce{kind}-18-noop", f"y = Reduce{kind}<noop_with_empty_axes=1>(x)", x=f(2, 3))
    empty = {"a": np.zeros(0, np.int64)}
    case(
        f"Reduce{kind}-18-noop-empty-axes",
        f"y = Reduce{kind}<noop_with_empty_axes=1>(x, a)",
        x=f(2, 3),
        constants=empty,
    )
    case(f"Reduce{kind}-18-noop-absent-axes", f"y = Reduce{kind}<keepdims=0>(x, )", x=f(2, 3, low=0.4))
case("ReduceSum-13", "y = ReduceSum<keepdims=0>(x, a)", opset=13, x=f(2, 3, 4), constants={"a": i(1)})
case(
    "ReduceProd-zeros",
    "y = ReduceProd<keepdims=0>(x, a)",
    x=np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 2.0], [1.0, 2.0, 3.0]]),
    constants={"a": i(1)},
)
case("ReduceL2-zero", "y = ReduceSumSquare(x)", x=np.zeros((2, 2)))
for reverse in (0, 1):
    for exclusive in (0, 1):
        case(
            f"CumSum-{reverse}{exclusive}",
            f"y = CumSum<reverse={reverse}, exclusive={exclusive}>(x, a)",
            x=f(2, 3),
            constants={"a": np.array(1)},
        )

# -- shapes --------------------------------------------------------------------------------------------------

case("Reshape", "y = Reshape(x, s)", x=f(2, 3, 4), constants={"s": i(0, -1)})
case("Reshape-5", "y = Reshape(x, s)", opset=11, x=f(2, 3, 4), constants={"s": i(4, 6)})
case("Flatten", "y = Flatten<axis=2>(x)", x=f(2, 3, 4))
case("Flatten-negative", "y = Flatten<axis=-1>(x)", opset=11, x=f(2, 3, 4))
case("Squeeze", "y = Squeeze(x, a)", x=f(2, 1, 3, 1), constants={"a": i(1, -1)})
case("Squeeze-all", "y = Squeeze(x)", x=f(2, 1, 3, 1), dynamic=False)
case("Squeeze-11", "y = Squeeze<axes=[1, 3]>(x)", opset=11, x=f(2, 1, 3, 1))
case("Unsqueeze", "y = Unsqueeze(x, a)", x=f(2, 3), constants={"a": i(0, -1)})
case("Unsqueeze-11", "y = Unsqueeze<axes=[0, 3]>(x)", opset=11, x=f(2, 3))
case("Transpose", "y = Transpose<perm=[2, 0, 1]>(x)", x=f(2, 3, 4))
case("Transpose-default", "y = Transpose(x)", x=f(2, 3, 4))
case("Transpose-twice", "z = Transpose<perm=[1, 0, 2]>(x)\n y = Transpose<perm=[1, 2, 0]>(z)", x=f(2, 3, 4))
case("DepthToSpace-DCR", 'y = DepthToSpace<blocksize=2, mode="DCR">(x)', x=f(1, 8, 2, 3))
case("DepthToSpace-CRD", 'y = DepthToSpace<blocksize=2, mode="CRD">(x)', x=f(1, 8, 2, 3))
case("SpaceToDepth", "y = SpaceToDepth<blocksize=2>(x)", x=f(1, 2, 4, 6))
case("SpaceToDepth-CRD", 'y = SpaceToDepth<blocksize=2, mode="CRD">(x)', opset=28, x=f(1, 2, 4, 6))
case(
    "AffineGrid",
    "y = AffineGrid(t, n)",
    opset=20,
    t=f(2, 2, 3),
    constants={"n": i(2, 3, 4, 5)},
    static=("t",),
)
case(
    "AffineGrid-3d-align",
    "y = AffineGrid<align_corners=1>(t, n)",
    opset=20,
    t=f(2, 3, 4),
    constants={"n": i(2, 3, 2, 4, 5)},
    static=("t",),
)
case("Concat", "y = Concat<axis=1>(a, b, a)", a=f(2, 3), b=f(2, 1))
case("Concat-negative", "y = Concat<axis=-2>(a, b)", a=f(2, 3), b=f(1, 3))
case("Concat-one", "y = Concat<axis=0>(a)", a=f(2, 3))
case(
    "Split-18-uneven", "y, z = Split<axis=1, num_outputs=2>(x)", outputs=("y", "z"), x=f(2, 5), dynamic=False
)
case(
    "Split-sizes",
    "y, z, u = Split<axis=-1>(x, s)",
    outputs=("y", "z", "u"),
    x=f(2, 6),
    constants={"s": i(1, 2, 3)},
)
case(
    "Split-18-uneven-unread",
    "y, u, z = Split<axis=1, num_outputs=3>(x)",
    outputs=("y", "z"),
    x=f(2, 7),
    dynamic=False,
)
case("Split-18-equal-unread", "u, y = Split<axis=1, num_outputs=2>(x)", x=f(2, 4))
case("Split-13-unread", "y, u = Split<axis=1>(x)", opset=13, x=f(2, 4))
case("Split-unread-first", "u, y = Split<axis=1>(x, s)", x=f(2, 5), constants={"s": i(2, 3)})
case("Split-unread-last", "y, u = Split<axis=1>(x, s)", x=f(2, 5), constants={"s": i(2, 3)})
case(
    "Split-unread-middle",
    "y, u, z = Split<axis=1>(x, s)",
    outputs=("y", "z"),
    x=f(2, 5),
    constants={"s": i(2, 2, 1)},
)
case("Split-11-equal", "y, z = Split<axis=1>(x)", opset=11, outputs=("y", "z"), x=f(2, 4))
case("Split-13-equal", "y, z = Split<axis=1>(x)", opset=13, outputs=("y", "z"), x=f(2, 4))
case("Split-11-sizes", "y, z = Split<axis=0, split=[1, 2]>(x)", opset=11, outputs=("y", "z"), x=f(3, 2))
case("Tile", "y = Tile(x, r)", x=f(2, 3), constants={"r": i(2, 3)})
case("Tile-given", "y = Tile(x, r)", x=f(2, 3), r=i(2, 1))
case("Trilu-upper", "y = Trilu(x)", x=f(2, 3, 4))
case("Trilu-lower", "y = Trilu<upper=0>(x, k)", x=f(3, 4), constants={"k": np.array(1)})
case("ReverseSequence", "y = ReverseSequence<batch_axis=0, time_axis=1>(x, n)", x=f(2, 4, 2), n=i(2, 4))
case("CenterCropPad-crop", "y = CenterCropPad(x, s)", x=f(5, 4), constants={"s": i(2, 3)})
case("CenterCropPad-pad", "y = CenterCropPad<axes=[1]>(x, s)", x=f(2, 3), constants={"s": i(6)})
case("Compress", "y = Compress<axis=1>(x, c)", x=f(2, 3), c=b(True, False, True))
case("Compress-flat", "y = Compress(x, c)", x=f(2, 3), c=b(True, False, True, True))

SLICES = {
    "plain": (i(1), i(3), i(0), None), "negative": (i(-3), i(-1), i(-1), None), "huge": (i(1), i(2**63 - 1), i(1), None),
    "beyond": (i(-100), i(100), i(1), None), "strided": (i(0), i(5), i(1), i(2)), "backwards": (i(-1), i(-100), i(1), i(-2)),
    "two-axes": (i(1, 0), i(3, 4), i(0, 1), i(1, 1)), "two-axes-strided": (i(0, 3), i(3, 0), i(0, 1), i(2, -1)),
    "no-axes": (i(1, 1), i(2, 4), None, None),
}  # fmt: skip
for label, (starts, ends, axes, steps) in SLICES.items():
    operands = {"s": starts, "e": ends, "a": axes, "t": steps}
    given = {name: value for name, value in operands.items() if value is not None}
    names = ", ".join(given)
    case(f"Slice-{label}", f"y = Slice(x, {names})", x=f(4, 5), constants=given)
    case(f"Slice-{label}-given", f"y = Slice(x, {names})", x=f(4, 5), **given)
case("Slice-9", "y = Slice<starts=[1, -3], ends=[3, 9], axes=[0, 1]>(x)", opset=9, x=f(4, 5))
case("Slice-1-no-axes", "y = Slice<starts=[1], ends=[3]>(x)", opset=7, x=f(4, 5))
case("Slice-10", "y = Slice(x, s, e)", opset=10, x=f(4, 5), constants={"s": i(1), "e": i(3)})

case("Pad", "y = Pad(x, p)", x=f(2, 3), constants={"p": i(0, 1, 2, 0)})
case("Pad-value", "y = Pad(x, p, v)", x=f(2, 3), v=np.array(0.7), constants={"p": i(0, 1, 2, 0)})
case("Pad-given", "y = Pad(x, p)", x=f(2, 3), p=i(1, 1, 0, 2))
case("Pad-crop", "y = Pad(x, p, v)", x=f(3, 4), v=np.array(0.7), constants={"p": i(-1, 1, 0, -2)})
case("Pad-axes", "y = Pad(x, p, , a)", x=f(2, 3), constants={"p": i(1, 2), "a": i(-1)})
case("Pad-reflect", 'y = Pad<mode="reflect">(x, p)', x=f(3, 4), constants={"p": i(1, 2, 2, 1)})
case("Pad-edge", 'y = Pad<mode="edge">(x, p)', x=f(3, 4), constants={"p": i(1, 2, 2, 1)})
case("Pad-wrap", 'y = Pad<mode="wrap">(x, p)', opset=19, x=f(3, 4), constants={"p": i(1, 2, 2, 1)})
case("Pad-2", "y = Pad<pads=[0, 1, 2, 0], value=1.5>(x)", opset=10, x=f(2, 3))
case("Pad-11", "y = Pad(x, p)", opset=11, x=f(2, 3), constants={"p": i(0, 1, 2, 0)})

# -- indexed access ------------------------------------------------------------------------------------------

for axis in (0, 1, -1):
    case(f"Gather-axis{axis}", f"y = Gather<axis={axis}>(x, i)", x=f(3, 4, 2), i=i([0, 1], [1, -1]))
    case(f"Gather-vector-axis{axis}", f"y = Gather<axis={axis}>(x, i)", x=f(3, 4, 2), i=i(1, 0, 1))
    case(
        f"Gather-one-axis{axis}",
        f"y = Gather<axis={axis}>(x, i)",
        x=f(3, 4, 2),
        constants={"i": np.array(-1)},
    )
    case(f"Gather-scalar-axis{axis}", f"y = Gather<axis={axis}>(x, i)", x=f(3, 4, 2), i=np.array(1))
    case(
        f"GatherElements-axis{axis}",
        f"y = GatherElements<axis={axis}>(x, i)",
        x=f(3, 4, 2),
        i=i([[0, 1], [1, -1]], [[1, 1], [0, 0]]),
    )
case("Gather-one-in-brackets", "y = Gather<axis=1>(x, i)", x=f(3, 4), constants={"i": i([[2]])})
case("Gather-vector-source", "y = Gather(x, i)", x=f(4), i=i([0, 0, -1], [2, 0, 1]))
case("GatherND", "y = GatherND(x, i)", x=f(3, 4, 2), i=i([0, 1], [2, -1], [0, 1]))
case("GatherND-batch", "y = GatherND<batch_dims=1>(x, i)", x=f(2, 3, 2), i=i([[1]], [[0]]))
for reduction, opset in (("none", 18), ("add", 18), ("mul", 18), ("max", 18), ("min", 18), ("add", 16)):
    unique = reduction in ("none", "mul", "max", "min")
    rows = i([0, 2], [1, 0]) if unique else i([0, 0], [0, -1])
    case(
        f"ScatterElements-{reduction}-{opset}",
        f'y = ScatterElements<axis=1, reduction="{reduction}">(x, i, u)',
        opset=opset,
        x=f(2, 3, low=0.5),
        i=rows,
        u=f(2, 2, low=0.6, seed=1),
    )
    places = i([0], [2]) if unique else i([2], [2])
    case(
        f"ScatterND-{reduction}-{opset}",
        f'y = ScatterND<reduction="{reduction}">(x, i, u)',
        opset=opset,
        x=f(3, 2, low=0.5),
        i=places,
        u=f(2, 2, low=0.6, seed=1),
    )
case(
    "ScatterElements-11", "y = ScatterElements(x, i, u)", opset=11, x=f(3, 2), i=i([0, 2]), u=f(1, 2, seed=1)
)
case("Scatter-9", "y = Scatter(x, i, u)", opset=9, x=f(3, 2), i=i([0, 2]), u=f(1, 2, seed=1))
case("OneHot", "y = OneHot(i, d, v)", i=i(0, 2, -1), v=f(2), constants={"d": np.array(4)})
case("TopK", "y, k = TopK<axis=1>(x, n)", x=f(2, 4), constants={"n": i(2)})
case("TopK-smallest", "y, k = TopK<axis=0, largest=0>(x, n)", x=f(4, 2), constants={"n": i(3)})
case("TopK-1", "y, k = TopK<k=2>(x)", opset=9, x=f(2, 4))
case("TopK-10", "y, k = TopK(x, n)", opset=10, x=f(2, 4), constants={"n": i(2)})
case("Unique", "y = Unique(x)", x=f(2, 3))
case("Unique-axis", "y = Unique<axis=1>(x)", x=f(2, 3))
case("Range", "y = Range(s, l, d)", s=np.array(0.3), d=np.array(0.7), constants={"l": np.array(3.0)})

# -- matrix products -----------------------------------------------------------------------------------------

MATMULS = {
    "2x2": ((2, 3), (3, 4)), "3x2": ((2, 2, 3), (3, 4)), "4x2": ((2, 1, 2, 3), (3, 4)), "3x3": ((2, 2, 3), (2, 3, 4)),
    "2x3": ((2, 3), (2, 3, 4)), "4x4-broadcast": ((2, 1, 2, 3), (1, 3, 3, 2)), "4x3": ((2, 3, 2, 3), (3, 3, 2)),
    "3x4": ((3, 2, 3), (2, 1, 3, 2)), "1x1": ((3,), (3,)), "1x2": ((3,), (3, 4)), "2x1": ((2, 3), (3,)), "1x3": ((3,), (2, 3, 4)),
    "3x1": ((2, 2, 3), (3,)), "1x4": ((3,), (2, 1, 3, 2)), "3x2-batch1": ((1, 2, 3), (3, 4)),
}  # fmt: skip
for label, (left, right) in MATMULS.items():
    case(f"MatMul-{label}", "y = MatMul(a, b)", a=f(*left), b=f(*right, seed=1))
case("MatMul-same", "y = MatMul(a, a)", a=f(3, 3))
case("MatMul-transposed-weight", "t = Transpose<perm=[1, 0]>(b)\n y = MatMul(a, t)", a=f(2, 2, 3), b=f(4, 3))
for trans_a in (0, 1):
    for trans_b in (0, 1):
        for label, c in {
            "none": None,
            "scalar": (),
            "row": (4,),
            "one": (1,),
            "column": (2, 1),
            "full": (2, 4),
        }.items():
            operands = {
                "a": f(*((3, 2) if trans_a else (2, 3))),
                "b": f(*((4, 3) if trans_b else (3, 4)), seed=1),
            }
            if c is not None:
                operands["c"] = f(*c, seed=2)
            case(
                f"Gemm-{trans_a}{trans_b}-{label}",
                f"y = Gemm<transA={trans_a}, transB={trans_b}, alpha=0.5, beta=1.5>({', '.join(operands)})",
                **operands,
            )

# -- normalisation and loss ----------------------------------------------------------------------------------

for axis, shape in ((-1, (4,)), (1, (3, 4)), (2, (4,)), (0, (2, 3, 4))):
    case(
        f"LayerNormalization-axis{axis}",
        f"y = LayerNormalization<axis={axis}, epsilon=0.1>(x, s, b)",
        opset=17,
        x=f(2, 3, 4),
        s=f(*shape, seed=1),
        b=f(*shape, seed=2),
    )
case("LayerNormalization-no-bias", "y = LayerNormalization(x, s)", opset=17, x=f(2, 3, 4), s=f(4, seed=1))
for reduction in ("mean", "sum", "none"):
    for label, ignore in {
        "": "",
        "-ignore": ", ignore_index=-100",
        "-ignore-class": ", ignore_index=1",
    }.items():
        labels = i([0, 1, 2], [1, -100 if label == "-ignore" else 0, 1])
        for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
            case(
                f"{op}-{reduction}{label}",
                f'y = {op}<reduction="{reduction}"{ignore}>(x, l)',
                x=f(2, 3, 3),
                l=labels,
            )
            case(
                f"{op}-{reduction}{label}-weights",
                f'y = {op}<reduction="{reduction}"{ignore}>(x, l, w)',
                x=f(2, 3, 3),
                l=labels,
                w=f(3, low=0.4, high=1.3, seed=1),
            )
case("SoftmaxCrossEntropyLoss-2d", "y = SoftmaxCrossEntropyLoss(x, l)", opset=13, x=f(3, 4), l=i(0, 3, 1))
case("SoftmaxCrossEntropyLoss-12", "y = SoftmaxCrossEntropyLoss(x, l)", opset=12, x=f(3, 4), l=i(0, 3, 1))
case(
    "SoftmaxCrossEntropyLoss-log-prob",
    "y, z = SoftmaxCrossEntropyLoss(x, l)",
    outputs=("y", "z"),
    x=f(2, 3, 3),
    l=i([0, 1, 2], [1, 0, 1]),
)

# -- convolution and pooling ---------------------------------------------------------------------------------

CONVS = {
    "plain": ((1, 2, 5, 4), (3, 2, 2, 3), ""), "padded": ((2, 2, 5, 4), (3, 2, 3, 3), "pads=[1,0,2,1]"),
    "strided": ((1, 2, 6, 5), (2, 2, 2, 2), "strides=[2,3]"), "strided-rest": ((1, 1, 6, 6), (2, 1, 3, 3), "strides=[2,2]"),
    "dilated": ((1, 2, 7, 6), (2, 2, 2, 3), "dilations=[2,2]"), "grouped": ((2, 4, 4, 4), (6, 2, 2, 2), "group=2, pads=[1,1,0,0]"),
    "depthwise": ((1, 3, 4, 4), (3, 1, 3, 3), "group=3, pads=[1,1,1,1]"), "1d": ((2, 2, 7), (3, 2, 3), "strides=[2], pads=[1,1]"),
    "3d": ((1, 1, 3, 4, 3), (2, 1, 2, 2, 2), "strides=[1,2,1]"), "everything": ((1, 4, 9, 8), (4, 2, 3, 2), "group=2, strides=[2,3], dilations=[2,1], pads=[1,0,2,1]"),
    "same-upper": ((1, 1, 5, 6), (2, 1, 2, 3), 'auto_pad="SAME_UPPER", strides=[2,2]'), "same-lower": ((1, 1, 5, 6), (2, 1, 2, 3), 'auto_pad="SAME_LOWER", strides=[2,1]'),
    "valid": ((1, 1, 5, 6), (2, 1, 2, 3), 'auto_pad="VALID"'), "pointwise-strided": ((1, 2, 4, 4), (2, 2, 1, 1), "strides=[2,2]"),
}  # fmt: skip
for label, (x, w, attributes) in CONVS.items():
    spaced = f"<{attributes}>" if attributes else ""
    kernel = f"kernel_shape=[{','.join(map(str, w[2:]))}]"
    case(
        f"Conv-{label}",
        f"y = Conv{spaced}(x, w, b)",
        x=f(*x),
        w=f(*w, seed=1),
        b=f(w[0], seed=2),
        linear=True,
        static=("w", "b"),
    )
CONV_TRANSPOSES = {
    "plain": ((1, 2, 3, 3), (2, 3, 2, 3), ""), "strided": ((1, 2, 3, 3), (2, 2, 3, 3), "strides=[2,3], pads=[1,0,1,2]"),
    "output-padding": ((1, 1, 3, 3), (1, 2, 3, 3), "strides=[2,2], output_padding=[1,1]"), "grouped": ((2, 4, 3, 2), (4, 1, 2, 2), "group=2, dilations=[1,2]"),
    "1d": ((2, 2, 4), (2, 3, 3), "strides=[2]"), "output-shape": ((1, 1, 3, 3), (1, 2, 3, 3), "strides=[2,2], output_shape=[6,6]"),
}  # fmt: skip
for label, (x, w, attributes) in CONV_TRANSPOSES.items():
    spaced = f"<{attributes}>" if attributes else ""
    group = 2 if "group=2" in attributes else 1
    case(
        f"ConvTranspose-{label}",
        f"y = ConvTranspose{spaced}(x, w, b)",
        x=f(*x),
        w=f(*w, seed=1),
        b=f(w[1] * group, seed=2),
        linear=True,
        static=("w", "b"),
        dynamic="output_shape" not in attributes,
    )
POOLS = {
    "plain": "kernel_shape=[2,2]", "strided": "kernel_shape=[3,2], strides=[2,2]", "padded": "kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,1]",
    "ceil": "kernel_shape=[3,3], strides=[2,2], ceil_mode=1", "same-upper": 'kernel_shape=[2,3], auto_pad="SAME_UPPER", strides=[2,2]',
    "same-lower": 'kernel_shape=[2,3], auto_pad="SAME_LOWER", strides=[1,2]', "ceil-padded": "kernel_shape=[3,3], strides=[2,2], ceil_mode=1, pads=[1,0,0,1]",
}  # fmt: skip
for label, attributes in POOLS.items():
    case(f"MaxPool-{label}", f"y = MaxPool<{attributes}>(x)", x=f(1, 2, 6, 5))
    case(f"AveragePool-{label}", f"y = AveragePool<{attributes}>(x)", x=f(1, 2, 6, 5), linear=True)
    case(
        f"AveragePool-{label}-include-pad",
        f"y = AveragePool<{attributes}, count_include_pad=1>(x)",
        x=f(1, 2, 6, 5),
        linear=True,
    )
    if "ceil" not in label:
        case(f"LpPool-{label}", f"y = LpPool<{attributes}, p=3>(x)", x=f(1, 2, 6, 5))
case(
    "AveragePool-19-dilated",
    "y = AveragePool<kernel_shape=[2,2], dilations=[2,1]>(x)",
    opset=19,
    x=f(1, 1, 5, 4),
    linear=True,
)
DEFORMED = {
    "plain": ((1, 2, 4, 5), (3, 2, 2, 2), (3, 4), "", 1), "everything": ((2, 4, 5, 4), (4, 2, 2, 3), (3, 3), "group=2, offset_group=2, strides=[2, 1], dilations=[1, 2], pads=[1, 1, 1, 2]", 2),
}  # fmt: skip
for label, (x, w, places, attributes, offset_groups) in DEFORMED.items():
    elements = offset_groups * w[2] * w[3]
    spaced = f"<{attributes}>" if attributes else ""
    tensors = {
        "x": f(*x),
        "w": f(*w, seed=1),
        "o": f(x[0], 2 * elements, *places, low=-0.9, high=1.1, seed=2),
    }
    case(f"DeformConv-{label}", f"y = DeformConv{spaced}(x, w, o)", opset=19, dynamic=False, **tensors)
    bias, mask = f(w[0], seed=3), f(x[0], elements, *places, seed=4)
    case(
        f"DeformConv-{label}-mask",
        f"y = DeformConv{spaced}(x, w, o, b, m)",
        opset=22,
        dynamic=False,
        b=bias,
        m=mask,
        **tensors,
    )
case("MaxPool-dilated", "y = MaxPool<kernel_shape=[2,2], dilations=[2,1]>(x)", x=f(1, 1, 5, 4))
case("MaxPool-1d", "y = MaxPool<kernel_shape=[3], strides=[2]>(x)", x=f(1, 2, 7))
case("GlobalAveragePool", "y = GlobalAveragePool(x)", x=f(2, 3, 4, 2))
case("GlobalMaxPool", "y = GlobalMaxPool(x)", x=f(2, 3, 4, 2))
case("GlobalLpPool", "y = GlobalLpPool<p=3>(x)", x=f(2, 3, 4, 2))

# -- defined by other operators in the standard --------------------------------------------------------------

case("RMSNormalization", "y = RMSNormalization<epsilon=0.1>(x, s)", opset=23, x=f(2, 3, 4), s=f(4, seed=1))
case(
    "GroupNormalization-21",
    "y = GroupNormalization<num_groups=2, epsilon=0.1, stash_type=11>(x, s, b)",
    opset=21,
    x=f(2, 4, 3),
    s=f(4, seed=1),
    b=f(4, seed=2),
)
case("MeanVarianceNormalization", "y = MeanVarianceNormalization<axes=[0, 2]>(x)", x=f(2, 3, 4))
case("MeanVarianceNormalization-9", "y = MeanVarianceNormalization<axes=[0, 2]>(x)", opset=11, x=f(2, 3, 4))
case(
    "Attention",
    "y = Attention(q, k, v)",
    opset=23,
    q=f(1, 2, 3, 4),
    k=f(1, 2, 3, 4, seed=1),
    v=f(1, 2, 3, 4, seed=2),
)
case(
    "Attention-causal-grouped",
    "y = Attention<is_causal=1, q_num_heads=4, kv_num_heads=2>(q, k, v)",
    opset=23,
    q=f(2, 3, 8),
    k=f(2, 3, 4, seed=1),
    v=f(2, 3, 4, seed=2),
    dynamic=False,
)
case(
    "RotaryEmbedding",
    "y = RotaryEmbedding(x, c, s)",
    opset=23,
    single=True,
    x=f(1, 2, 3, 4),
    c=f(1, 3, 2, seed=1),
    s=f(1, 3, 2, seed=2),
)
BATCH_NORM = {"s": f(3, seed=1), "b": f(3, seed=2), "m": f(3, seed=3), "v": f(3, low=0.5, seed=4)}
for label, shape in {"2d": (4, 3), "3d": (2, 3, 4), "4d": (2, 3, 2, 2)}.items():
    for opset in (9, 14, 15):
        case(
            f"BatchNormalization-{opset}-{label}",
            "y = BatchNormalization<epsilon=0.1>(x, s, b, m, v)",
            opset=opset,
            x=f(*shape),
            **BATCH_NORM,
        )
    STATISTICS = {name: BATCH_NORM[name] for name in ("s", "b")}
    RUNNING = {name: BATCH_NORM[name] for name in ("m", "v")}
    case(
        f"BatchNormalization-15-training-{label}",
        "y, n, w = BatchNormalization<epsilon=0.1, training_mode=1>(x, s, b, m, v)",
        opset=15,
        x=f(*shape),
        constants=RUNNING,
        **STATISTICS,
    )
case(
    "BatchNormalization-9-training",
    "y, n, w, o, u = BatchNormalization<epsilon=0.1>(x, s, b, m, v)",
    opset=9,
    x=f(2, 3, 4),
    constants=RUNNING,
    **STATISTICS,
    dynamic=False,
)
case(
    "InstanceNormalization",
    "y = InstanceNormalization<epsilon=0.1>(x, s, b)",
    x=f(2, 3, 4),
    s=f(3, seed=1),
    b=f(3, seed=2),
)
for p in (1, 2):
    case(f"LpNormalization-{p}", f"y = LpNormalization<axis=1, p={p}>(x)", x=f(2, 3, 4))
for size in (1, 2, 3, 5):
    case(f"LRN-{size}", f"y = LRN<size={size}, alpha=0.5, beta=0.75, bias=1.5>(x)", x=f(1, 5, 2, 2))

# -- recurrent networks --------------------------------------------------------------------------------------

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
for op, gates in GATES.items():
    outputs = ("y", "h", "c") if op == "LSTM" else ("y", "h")
    left = ", ".join(outputs)
    variants = {"": "", "-after-reset": ", linear_before_reset=1"} if op == "GRU" else {"": ""}
    variants |= {"-relu": ', activations=["Relu"]'} if op == "RNN" else {}
    for label, extra in variants.items():
        for direction, count in {"forward": 1, "reverse": 1, "bidirectional": 2}.items():
            if label == "-relu" and count == 2:
                continue
            weights = {
                "w": f(count, gates * 2, 3, seed=1, low=-0.8, high=0.8),
                "r": f(count, gates * 2, 2, seed=2, low=-0.8, high=0.8),
            }
            bias = {"b": f(count, gates * 4, seed=3)}
            states = {"h0": f(count, 2, 2, seed=4)} | ({"c0": f(count, 2, 2, seed=5)} if op == "LSTM" else {})
            attributes = f'hidden_size=2, direction="{direction}"{extra}'
            case(
                f"{op}{label}-{direction}",
                f"{left} = {op}<{attributes}>(x, w, r)",
                outputs=outputs,
                x=f(3, 2, 3, seed=12),
                **weights,
                single=True,
            )
            case(
                f"{op}{label}-{direction}-full",
                f"{left} = {op}<{attributes}>(x, w, r, b, , {', '.join(states)})",
                outputs=outputs,
                x=f(3, 2, 3),
                **weights,
                **bias,
                **states,
                single=True,
            )
            case(
                f"{op}{label}-{direction}-lengths",
                f"{left} = {op}<{attributes}>(x, w, r, b, n, {', '.join(states)})",
                outputs=outputs,
                x=f(3, 2, 3),
                n=np.array([3, 2], np.int32),
                **weights,
                **bias,
                **states,
                single=True,
            )

# layout 1 has the batch first in x, y and the states; onnx's reference runs it, for one direction only
for direction, count in {"forward": 1, "reverse": 1, "bidirectional": 2}.items():
    parameters = {
        "w": f(count, 8, 3, seed=1, low=-0.8, high=0.8), "r": f(count, 8, 2, seed=2, low=-0.8, high=0.8), "b": f(count, 16, seed=3),
        "h0": f(count, 2, 2, seed=4), "c0": f(count, 2, 2, seed=5), "p": f(count, 6, seed=6),
    }  # fmt: skip
    for label, lengths in {"": "", "-lengths": "n"}.items():
        case(
            f"LSTM-peepholes-{direction}{label}",
            f'y, h, c = LSTM<hidden_size=2, direction="{direction}">(x, w, r, b, {lengths}, h0, c0, p)',
            outputs=("y", "h", "c"),
            x=f(3, 2, 3),
            **({"n": np.array([3, 2], np.int32)} if lengths else {}),
            **parameters,
            single=True,
        )
for op, gates in GATES.items():
    states, outputs = {"h0": f(3, 1, 2, seed=4)}, ("y", "h")
    if op == "LSTM":
        states, outputs = states | {"c0": f(3, 1, 2, seed=5)}, ("y", "h", "c")
    case(
        f"{op}-layout",
        f"{', '.join(outputs)} = {op}<hidden_size=2, layout=1>(x, w, r, b, , {', '.join(states)})",
        outputs=outputs,
        x=f(3, 2, 3),
        w=f(1, gates * 2, 3, seed=1, low=-0.8, high=0.8),
        r=f(1, gates * 2, 2, seed=2, low=-0.8, high=0.8),
        b=f(1, gates * 4, seed=3),
        **states,
        single=True,
    )

# -- Einsum, Det ---------------------------------------------------------------------------------------------

EINSUMS = {
    "transpose": ("ij->ji", (2, 3)), "sum": ("ij->i", (2, 3)), "inner": ("i,i", (3,), (3,)), "matmul": ("bij,bjk->bik", (2, 2, 3), (2, 3, 2)),
    "implicit": ("ij,jk", (2, 3), (3, 2)), "ellipsis": ("...ij,...jk->...ik", (2, 2, 3), (2, 3, 2)), "ellipsis-broadcast": ("...ij,...jk->...ik", (2, 1, 2, 3), (3, 3, 2)),
    "diagonal": ("...ii->...i", (2, 3, 3)), "trace": ("ii", (3, 3)), "three": ("ij,jk,kl->il", (2, 3), (3, 2), (2, 2)), "outer": ("i,j->ij", (2,), (3,)),
    "attention": ("bqhd,bkhd->bhqk", (1, 2, 2, 3), (1, 3, 2, 3)), "one-sided-sum": ("ij,k->k", (2, 3), (2,)), "spaces": (" i j , j -> i ", (2, 3), (3,)),
}  # fmt: skip
for label, (equation, *shapes) in EINSUMS.items():
    names = "abc"[: len(shapes)]
    case(
        f"Einsum-{label}",
        f'y = Einsum<equation="{equation}">({", ".join(names)})',
        opset=12,
        **{
            name: f(*shape, seed=place) for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
        },
    )
case("Det", "y = Det(x)", x=f(2, 3, 3), dynamic=False)
case("Det-1", "y = Det(x)", x=f(1, 1), dynamic=False)

# -- resampling ----------------------------------------------------------------------------------------------

RESIZES = {
    "nearest-up": ('mode="nearest"', (1.0, 1.0, 2.0, 3.0)), "nearest-down": ('mode="nearest", nearest_mode="ceil"', (1.0, 1.0, 0.5, 0.7)),
    "linear-up": ('mode="linear"', (1.0, 1.0, 2.0, 1.5)), "linear-align": ('mode="linear", coordinate_transformation_mode="align_corners"', (1.0, 1.0, 2.0, 0.6)),
    "linear-asymmetric": ('mode="linear", coordinate_transformation_mode="asymmetric"', (1.0, 1.0, 1.7, 2.0)), "cubic": ('mode="cubic"', (1.0, 1.0, 1.5, 2.0)),
    "linear-antialias": ('mode="linear", antialias=1', (1.0, 1.0, 0.5, 0.6)), "pytorch": ('mode="linear", coordinate_transformation_mode="pytorch_half_pixel"', (1.0, 1.0, 0.5, 2.0)),
}  # fmt: skip
for label, (attributes, scales) in RESIZES.items():
    case(
        f"Resize-{label}",
        f"y = Resize<{attributes}>(x, , s)",
        x=f(1, 2, 4, 5),
        constants={"s": np.array(scales, np.float32)},
        linear=True,
    )
case(
    "Resize-sizes",
    'y = Resize<mode="linear">(x, , , n)',
    x=f(1, 1, 4, 5),
    constants={"n": i(1, 1, 7, 3)},
    linear=True,
)
# sizes whose common scale leads to a size rounded up, rounded down, and to one that is as before
for policy in ("not_larger", "not_smaller"):
    for mode in ("nearest", "linear", "cubic"):
        for label, sizes in {"up": (7, 8), "down": (3, 3), "near": (4, 6)}.items():
            case(
                f"Resize-{policy}-{mode}-{label}",
                f'y = Resize<mode="{mode}", axes=[2, 3], keep_aspect_ratio_policy="{policy}", coordinate_transformation_mode="{"asymmetric" if label == "up" else "half_pixel"}">(x, , , n)',
                x=f(1, 1, 4, 5),
                constants={"n": i(*sizes)},
                linear=True,
            )
case(
    "Resize-axes",
    'y = Resize<mode="linear", axes=[2, 3]>(x, , , n)',
    x=f(1, 1, 4, 5),
    constants={"n": i(7, 3)},
    linear=True,
)
case(
    "Resize-11",
    'y = Resize<mode="nearest">(x, r, s)',
    opset=11,
    x=f(1, 1, 4, 5),
    constants={"r": np.zeros(0, np.float32), "s": np.array([1, 1, 2, 2], np.float32)},
    linear=True,
)
case(
    "Resize-10",
    'y = Resize<mode="nearest">(x, s)',
    opset=10,
    x=f(1, 1, 4, 5),
    constants={"s": np.array([1, 1, 1.7, 2], np.float32)},
    linear=True,
)
case(
    "Resize-10-linear",
    'y = Resize<mode="linear">(x, s)',
    opset=10,
    x=f(1, 1, 4, 5),
    constants={"s": np.array([1, 1, 1.7, 2], np.float32)},
    linear=True,
)
case(
    "Upsample-9",
    'y = Upsample<mode="nearest">(x, s)',
    opset=9,
    x=f(1, 1, 4, 5),
    constants={"s": np.array([1, 1, 2, 3], np.float32)},
    linear=True,
)
case(
    "Upsample-7-linear",
    'y = Upsample<mode="linear", scales=[1.0, 1.0, 2.0, 3.0]>(x)',
    opset=7,
    x=f(1, 1, 4, 5),
    linear=True,
)
# regions beyond every border, smaller than an element, and two of one image
ROIS = {
    "r": np.array(
        [[0.4, 0.7, 4.6, 3.2], [-3.0, 1.0, 2.3, 9.0], [1.2, 2.1, 1.5, 2.2], [3.0, -1.5, 7.5, 2.5]], np.float32
    ),
    "n": i(1, 0, 1, 0),
}
for label, attributes in {
    "half-pixel": "output_height=2, output_width=3, sampling_ratio=2",
    "adaptive": "output_height=2, output_width=1",
    "scaled": "output_height=3, output_width=2, sampling_ratio=1, spatial_scale=0.5",
    "output-half-pixel": 'output_height=2, output_width=3, coordinate_transformation_mode="output_half_pixel"',
}.items():
    case(
        f"RoiAlign-{label}",
        f"y = RoiAlign<{attributes}>(x, r, n)",
        x=f(2, 3, 4, 6),
        constants=ROIS,
        linear=True,
    )
case(
    "RoiAlign-10",
    "y = RoiAlign<output_height=2, output_width=2>(x, r, n)",
    opset=11,
    x=f(2, 1, 4, 6),
    constants=ROIS,
    linear=True,
)
case(
    "Col2Im",
    "y = Col2Im<strides=[1, 2], pads=[1, 0, 0, 1]>(x, n, k)",
    x=f(1, 8, 10),
    constants={"n": i(5, 4), "k": i(2, 2)},
    dynamic=False,
    reference=True,
)
case("CumProd", "y = CumProd<exclusive=1>(x, a)", opset=26, x=f(2, 3), constants={"a": np.array(1)})

# -- what ONNX Runtime's optimizer writes --------------------------------------------------------------------

MS = {"com.microsoft": 1}
case("ms.Gelu", "y = com.microsoft.Gelu(x)", x=f(2, 4), domains=MS, single=True)
case("ms.QuickGelu", "y = com.microsoft.QuickGelu<alpha=1.5>(x)", x=f(2, 4), domains=MS, single=True)
case("ms.FastGelu", "y = com.microsoft.FastGelu(x)", x=f(2, 4), domains=MS, single=True)
case(
    "ms.FastGelu-bias", "y = com.microsoft.FastGelu(x, b)", x=f(2, 4), b=f(4, seed=1), domains=MS, single=True
)
case("ms.BiasGelu", "y = com.microsoft.BiasGelu(x, b)", x=f(2, 4), b=f(4, seed=1), domains=MS, single=True)
for trans_a in (0, 1):
    for trans_b in (0, 1):
        left, right = f(2, *((3, 2) if trans_a else (2, 3))), f(2, *((4, 3) if trans_b else (3, 4)), seed=1)
        case(
            f"ms.FusedMatMul-{trans_a}{trans_b}",
            f"y = com.microsoft.FusedMatMul<alpha=0.5, transA={trans_a}, transB={trans_b}>(a, b)",
            a=left,
            b=right,
            domains=MS,
            linear=True,
        )
        case(
            f"ms.FusedMatMul-{trans_a}{trans_b}-broadcast",
            f"y = com.microsoft.FusedMatMul<alpha=0.5, transA={trans_a}, transB={trans_b}>(a, b)",
            a=left,
            b=right[0],
            domains=MS,
            linear=True,
        )
for activation in ("Relu", "LeakyRelu", "Tanh", "Sigmoid"):
    slope = ", activation_alpha=0.3" if activation == "LeakyRelu" else ""
    case(
        f"ms.FusedGemm-{activation}",
        f'y = com.microsoft.FusedGemm<activation="{activation}"{slope}, alpha=0.5, beta=1.5, transB=1>(a, b, c)',
        a=f(2, 3),
        b=f(4, 3, seed=1),
        c=f(4, seed=2),
        domains=MS,
        single=True,
    )
for label, outputs in {"": ("y",), "-sum": ("y", "t")}.items():
    case(
        f"ms.SkipLayerNormalization{label}",
        "y, m, v, t = com.microsoft.SkipLayerNormalization<epsilon=0.1>(x, k, g, b, d)",
        outputs=outputs,
        x=f(2, 2, 4),
        k=f(2, 2, 4, seed=1),
        g=f(4, seed=2),
        b=f(4, seed=3),
        d=f(4, seed=4),
        domains=MS,
        single=True,
    )
    case(
        f"ms.SkipSimplifiedLayerNormalization{label}",
        "y, m, v, t = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.1>(x, k, g, d)",
        outputs=outputs,
        x=f(2, 2, 4),
        k=f(2, 2, 4, seed=1),
        g=f(4, seed=2),
        d=f(4, seed=4),
        domains=MS,
        single=True,
    )

# -- DFT, DequantizeLinear -----------------------------------------------------------------------------------

for opset in (17, 20):
    axis = ", axis=1" if opset == 17 else ""
    extra = "" if opset == 17 else ", , k"
    constants = {} if opset == 17 else {"k": np.array(1)}
    for label, (components, attributes) in {
        "real": (1, "inverse=0"),
        "complex": (2, "inverse=0"),
        "inverse": (2, "inverse=1"),
        "onesided": (1, "onesided=1"),
    }.items():
        case(
            f"DFT-{opset}-{label}",
            f"y = DFT<{attributes}{axis}>(x{extra})",
            opset=opset,
            x=f(2, 5, 3, components),
            constants=constants,
        )
    for length in (3, 7):
        case(
            f"DFT-{opset}-length{length}",
            f"y = DFT<inverse=0{axis}>(x, n{extra[3:] and ', k'})",
            opset=opset,
            x=f(2, 5, 3, 1),
            constants={**constants, "n": np.array(length)},
        )
case(
    "DequantizeLinear",
    "y = DequantizeLinear(q, s, z)",
    q=np.arange(6, dtype=np.uint8).reshape(2, 3),
    s=np.array(0.3),
    constants={"z": np.array(2, np.uint8)},
    single=True,
)
case(
    "DequantizeLinear-axis",
    "y = DequantizeLinear<axis=1>(q, s, z)",
    q=np.arange(6, dtype=np.uint8).reshape(2, 3),
    s=f(3, low=0.5),
    constants={"z": np.array([2, 0, 5], np.uint8)},
    single=True,
)

case(
    "TensorScatter",
    "y = TensorScatter<axis=1>(c, u, i)",
    opset=24,
    c=f(2, 4, 3),
    u=f(2, 2, 3, seed=1),
    constants={"i": i(1, 2)},
)
case(
    "TensorScatter-circular",
    'y = TensorScatter<axis=1, mode="circular">(c, u, i)',
    opset=24,
    c=f(2, 4, 3),
    u=f(2, 2, 3, seed=1),
    constants={"i": i(3, 2)},
)
case("MaxPool-storage-order", "y = MaxPool<kernel_shape=[2, 2], storage_order=1>(x)", x=f(1, 1, 4, 3))
case(
    "BatchNormalization-15-training-statistics",
    "y, n, w = BatchNormalization<epsilon=0.1, momentum=0.7, training_mode=1>(x, s, b, m, v)",
    opset=15,
    outputs=("y", "n", "w"),
    x=f(2, 3, 4),
    **BATCH_NORM,
)
case(
    "LayerNormalization-statistics",
    "y, m, r = LayerNormalization<epsilon=0.1>(x, s, b)",
    opset=17,
    outputs=("y", "m", "r"),
    x=f(2, 3, 4),
    s=f(4, seed=1),
    b=f(4, seed=2),
    single=True,
)
case(
    "Attention-qk-output",
    "y, , , q = Attention(q0, k, v)",
    opset=23,
    outputs=("y", "q"),
    q0=f(1, 2, 3, 4),
    k=f(1, 2, 3, 4, seed=1),
    v=f(1, 2, 3, 4, seed=2),
)

# -- Scan ----------------------------------------------------------------------------------------------------------------

SCAN = "[scan] s, y = Scan<num_scan_inputs=2, body = step (double[3] state, double[3] x, double[3] g) => (double[3] after, double[3] out) {t = Mul(state, g) u = Add(t, x) after = Tanh(u) out = Mul(after, x)}>(h, xs, gs)"
case("Scan", SCAN, outputs=("s", "y"), h=f(3), xs=f(4, 3, seed=1), gs=f(4, 3, seed=2))
case(
    "Scan-outer-constant",
    SCAN.replace("out = Mul(after, x)", "out = Mul(after, k)"),
    outputs=("s", "y"),
    h=f(3),
    xs=f(4, 3, seed=1),
    gs=f(4, 3, seed=2),
    constants={"k": f(3, seed=3)},
)
case("Scan-only-result", SCAN, outputs=("y",), h=f(3), xs=f(4, 3, seed=1), gs=f(4, 3, seed=2))
case(
    "STFT",
    "y = STFT(x, n, w)",
    opset=17,
    x=f(1, 20, 1),
    w=f(6, low=0.3, high=1.2, seed=1),
    constants={"n": np.array(4)},
    static=("w",),
    single=True,
)
case(
    "STFT-twosided",
    "y = STFT<onesided=0>(x, n, , l)",
    opset=17,
    x=f(2, 20, 1),
    constants={"n": np.array(3), "l": np.array(8)},
    single=True,
)
case(
    "DequantizeLinear-blocks",
    "y = DequantizeLinear<axis=1, block_size=2>(q, s, z)",
    opset=21,
    q=np.arange(10, dtype=np.uint8).reshape(2, 5),
    s=f(2, 3, low=0.5),
    constants={"z": np.arange(6, dtype=np.uint8).reshape(2, 3)},
    reference=True,
    single=True,
)
