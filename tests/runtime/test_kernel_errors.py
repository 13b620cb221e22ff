"""Bad input gets an exception that names node, input, rule and what was got; then good input runs as ever."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_models import make_model, run_session
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, Inputs, assert_matches, make_inputs
from plugin_sessions import plugin_session

NAMES = ("dy", "x1", "x2", "rstd", "mean", "gamma", "dsum")


def session_for_any_shape(dtype: np.dtype = FLOAT):
    """One session whose model says nothing about shapes, so that all of them reach the kernel."""
    model = make_model(make_inputs((4, 6), dtype), declare_outputs=False, node_name="n12")
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    return plugin_session(model)


WRONG_SHAPES = [
    ({"x1": (4, 5)}, "x1 must have the shape of dy, [4,6]; got [4,5]"),
    ({"x1": (6, 4)}, "x1 must have the shape of dy, [4,6]; got [6,4]"),
    ({"x1": (24,)}, "x1 must have the shape of dy, [4,6]; got [24]"),
    ({"x2": (6,)}, "x2 must have the shape of dy, [4,6]; got [6]"),
    ({"x2": (1, 6)}, "x2 must have the shape of dy, [4,6]; got [1,6]"),
    ({"dsum": (1, 4, 6)}, "dsum must have the shape of dy, [4,6]; got [1,4,6]"),
    ({"dsum": ()}, "dsum must have rank 1 to 8; got rank 0"),
    ({"dy": (2, 4, 6)}, "x1 must have the shape of dy, [2,4,6]; got [4,6]"),
    ({"dy": ()}, "dy must have rank 1 to 8; got rank 0"),
    ({"dy": (1,) * 7 + (4, 6)}, "dy must have rank 1 to 8; got rank 9"),
    ({"gamma": (5,)}, "gamma must be [6], the last axis of dy [4,6]; got [5]"),
    ({"gamma": (7,)}, "gamma must be [6], the last axis of dy [4,6]; got [7]"),
    ({"gamma": (1,)}, "gamma must be [6], the last axis of dy [4,6]; got [1]"),
    ({"gamma": (6, 4)}, "gamma must be [4,6], the last 2 axes of dy [4,6]; got [6,4]"),
    ({"gamma": (1, 4, 6)}, "gamma must be [4,6], the last 2 axes of dy [4,6]; got [1,4,6]"),
    ({"gamma": ()}, "gamma must have rank 1 to 8; got rank 0"),
    ({"rstd": (3, 1)}, "rstd must be [4,1], one value for each row of dy [4,6]"),
    ({"rstd": (6,)}, "rstd must be [4,1], one value for each row of dy [4,6]"),
    ({"rstd": ()}, "rstd must be [4,1], one value for each row of dy [4,6]"),
    ({"mean": (1, 4)}, "mean must be [4,1], one value for each row of dy [4,6]"),
    ({"mean": (4, 6)}, "mean must be [4,1], one value for each row of dy [4,6]"),
    ({"mean": (4, 1, 1)}, "mean must be [4,1], one value for each row of dy [4,6]"),
    (
        {"dy": (4, 0), "x1": (4, 0), "x2": (4, 0), "dsum": (4, 0), "gamma": (0,)},
        "at least one element; got [0]",
    ),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_shapes_are_refused_and_the_session_stays_usable(dtype):
    session = session_for_any_shape(dtype)
    good = make_inputs((4, 6), dtype)
    for shapes, message in WRONG_SHAPES:
        bad = good.replace(
            **{name: np.ones(shape, getattr(good, name).dtype) for name, shape in shapes.items()}
        )
        with pytest.raises(Exception, match=re.escape("AddLayerNormGrad (node 'n12'): ")) as caught:
            run_session(session, bad.arrays())
        assert message in str(caught.value)
        assert_matches(good, **run_session(session, good.arrays()))


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_shapes_are_either_refused_or_computed_right(any_shape_session, data):
    """Shapes near good ones: an axis changed, dropped, added or swapped in one or two of the inputs."""
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    axes = data.draw(st.integers(1, len(shape)))
    if 0 in shape[len(shape) - axes :]:
        shape = (*shape[: len(shape) - axes], *(max(1, n) for n in shape[len(shape) - axes :]))
    inputs = make_inputs(shape, axes=axes, trailing_ones=data.draw(st.booleans()))
    changed = set()
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True)):
        old = list(getattr(inputs, name).shape)
        new = data.draw(changed_shape(old))
        if new != old:
            changed.add(name)
            inputs = inputs.replace(**{name: np.ones(new, FLOAT)})
    try:
        results = run_session(any_shape_session, inputs.arrays())
    except Exception as error:
        assert changed, f"good shapes were refused: {error}"
        assert "AddLayerNormGrad (node 'n12'): " in str(error)
        assert re.search(r"\b(dy|x1|x2|rstd|mean|gamma|dsum) must .*; got ", str(error))
    else:
        assert is_right_shape(inputs)
        assert_matches(inputs, **results)


@pytest.fixture(scope="module")
def any_shape_session():
    return session_for_any_shape()


@st.composite
def changed_shape(draw, old: list[int]) -> list[int]:
    new = list(old)
    kind = draw(st.sampled_from(["length", "drop", "insert", "reverse"]))
    index = draw(st.integers(0, max(0, len(new) - 1)))
    if kind == "length" and new:
        new[index] = draw(st.integers(0, 6))
    elif kind == "drop" and new:
        del new[index]
    elif kind == "insert":
        new.insert(index, draw(st.integers(0, 3)))
    elif kind == "reverse":
        new.reverse()
    return new


def is_right_shape(inputs: Inputs) -> bool:
    """The rules of the operator's description, said once more and independently of the kernel."""
    shape, norm = inputs.dy.shape, inputs.gamma.shape
    leading = shape[: len(shape) - len(norm)]
    statistics = (leading, leading + (1,) * len(norm))
    return (
        1 <= len(norm) <= len(shape) <= 8
        and 0 not in norm
        and shape[len(leading) :] == norm
        and all(array.shape == shape for array in (inputs.x1, inputs.x2, inputs.dsum))
        and inputs.rstd.shape in statistics
        and inputs.mean.shape in statistics
    )


@pytest.mark.parametrize(
    "types, got",
    [
        ({"dy": np.float64, "x1": np.float64, "x2": np.float64, "dsum": np.float64}, "tensor(double)"),
        ({"dy": np.int32, "x1": np.int32, "x2": np.int32, "dsum": np.int32}, "tensor(int32)"),
        ({"x1": np.float16}, None),
        ({"dsum": np.float16}, None),
        ({"rstd": np.float16}, "tensor(float16)"),
        ({"mean": np.float64}, "tensor(double)"),
        ({"gamma": np.float64}, "tensor(double)"),
        ({"dy": FLOAT16, "x1": FLOAT16, "x2": FLOAT16, "dsum": FLOAT16, "gamma": BFLOAT16}, None),
        ({"gamma": np.float16}, None),
    ],
    ids=str,
)
def test_wrong_types_are_refused_when_the_model_is_loaded(types, got):
    """The sentence is the runtime's own; types that only do not go together are not named in it."""
    inputs = make_inputs((4, 6))
    inputs = inputs.replace(**{name: getattr(inputs, name).astype(dtype) for name, dtype in types.items()})
    model = make_model(inputs, declare_outputs=False, node_name="n12")
    with pytest.raises(Exception, match="AddLayerNormGrad|n12") as caught:
        plugin_session(model)
    if got is not None:
        assert got in str(caught.value)


@pytest.mark.parametrize("missing", [0, 1, 3, 4, 5])
def test_missing_required_inputs_are_refused_when_the_model_is_loaded(missing):
    model = make_model(make_inputs((4, 6)), node_name="n12")
    del model.graph.input[missing]
    model.graph.node[0].input[missing] = ""
    with pytest.raises(Exception, match="n12"):
        plugin_session(model)


def test_a_result_too_large_for_memory_is_an_error():
    """The inputs claim 2^46 elements, more than an address space holds; nothing of them may be read."""
    session = session_for_any_shape()
    binding = session.io_binding()
    small = np.zeros(64, FLOAT)
    shapes = {"dy": [2**44, 4], "rstd": [2**44], "gamma": [4]}
    for name in NAMES:
        shape = shapes.get({"mean": "rstd"}.get(name, name), shapes["dy"])
        binding.bind_input(name, "cpu", 0, onnx.TensorProto.FLOAT, shape, small.ctypes.data)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    with pytest.raises(Exception, match="n12"):
        session.run_with_iobinding(binding)
    good = make_inputs((4, 6))
    assert_matches(good, **run_session(session, good.arrays()))
