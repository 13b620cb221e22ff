"""Dropout with the mask of the same run, losses at their edges, 16-bit and mixed precision, embeddings on
many threads."""

# ruff: noqa: E501  (models in ONNX's text format and rows of tables read better on one line)

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from scipy.special import erf

import ort_ops
from ort_ops.gradient import GradientError, build_gradient_model
from ort_ops.operators import REFERENCE_OPS

GENERATOR = np.random.default_rng(7)
_FIRST_STATE = GENERATOR.bit_generator.state


@pytest.fixture(autouse=True)
def generator_begins_anew() -> None:
    """A test's numbers do not depend on which tests ran before it."""
    GENERATOR.bit_generator.state = _FIRST_STATE


def parse(text: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')


def run(model: onnx.ModelProto, threads: int = 1, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    ort_ops.register(options)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {value.name for value in session.get_inputs()}
    results = session.run(None, {name: value for name, value in feeds.items() if name in given})
    return dict(zip([value.name for value in session.get_outputs()], results, strict=True))


@pytest.mark.parametrize("outputs", ["y", "y, m"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("given", ["constant", "input"])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_dropout_in_training(outputs: str, ratio: float, given: str, kind: str) -> None:
    """The gradient is 1 / (1 - ratio) exactly where the output of the same run is not zero."""
    model = parse(f"""g ({kind}[40,30] x, float r, bool t) => (float loss, {kind}[40,30] y) {{
        {outputs} = Dropout<seed=3>(x, r, t)  z = Cast<to=1>(y)  loss = ReduceSum<keepdims=0>(z) }}""")
    feeds = {"r": np.array(ratio, np.float32), "t": np.array(True)}
    if given == "constant":
        del model.graph.input[1:]
        model.graph.initializer.extend(
            onnx.numpy_helper.from_array(value, name) for name, value in feeds.items()
        )
    training = build_gradient_model(model, ["x"])
    onnx.checker.check_model(training, full_check=True)
    dtype = np.float16 if kind == "float16" else np.float32
    results = run(training, x=np.ones((40, 30), dtype), **feeds)
    kept = results["y"] != 0
    assert results["x_grad"].dtype == dtype
    np.testing.assert_array_equal(results["x_grad"] != 0, kept)
    np.testing.assert_allclose(
        results["x_grad"][kept], 1 / (1 - ratio), rtol=1e-3 if kind == "float16" else 1e-6
    )
    if 0 < ratio < 0.9:
        assert 0 < kept.mean() < 1


@pytest.mark.parametrize("given", [False, True])
def test_dropout_that_is_switched_off_at_run_time(given: bool) -> None:
    model = parse("""g (float[4,5] x, bool t) => (float loss) <float r = {0.5}> {
        y = Dropout(x, r, t)  loss = ReduceSum<keepdims=0>(y) }""")
    results = run(build_gradient_model(model, ["x"]), x=np.ones((4, 5), np.float32), t=np.array(given))
    assert set(np.unique(results["x_grad"])) <= ({0.0, 2.0} if given else {1.0})


def test_dropout_defaults_to_a_half() -> None:
    model = parse("""g (float[40,5] x) => (float loss) <bool t = {1}> {
        y = Dropout(x, , t)  loss = ReduceSum<keepdims=0>(y) }""")
    results = run(build_gradient_model(model, ["x"]), x=np.ones((40, 5), np.float32))
    assert set(np.unique(results["x_grad"])) == {0.0, 2.0}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("declared", ["loss", "loss, p"])
def test_rows_whose_label_is_ignored_have_no_gradient(reduction: str, declared: str) -> None:
    model = parse(f"""g (float[4,5] x, int64[4] l) => (float loss) {{
        {declared} = SoftmaxCrossEntropyLoss<reduction="{reduction}", ignore_index=-100>(x, l) }}""")
    training = build_gradient_model(model, ["x"])
    x, labels = GENERATOR.standard_normal((4, 5)).astype(np.float32), np.array([1, -100, 4, -100])
    gradient = run(training, x=x, l=labels)["x_grad"]
    np.testing.assert_array_equal(gradient[[1, 3]], 0)
    soft = np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True)
    expected = (soft - np.eye(5)[labels % 5])[[0, 2]] / (2 if reduction == "mean" else 1)
    np.testing.assert_allclose(gradient[[0, 2]], expected, rtol=0, atol=1e-6)


def test_a_batch_whose_labels_are_all_ignored_has_a_gradient_of_zeros() -> None:
    """The loss itself is 0 / 0, and runtimes differ about it; the gradient is zero, as PyTorch's."""
    model = parse("""g (float[3,5] x, int64[3] l) => (float loss) {
        loss = SoftmaxCrossEntropyLoss<ignore_index=-100>(x, l) }""")
    x = GENERATOR.standard_normal((3, 5)).astype(np.float32)
    gradient = run(build_gradient_model(model, ["x"]), x=x, l=np.full(3, -100))["x_grad"]
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_an_embedding_that_repeats_one_row_loses_nothing_on_many_threads(threads: int) -> None:
    model = parse(
        """g (int64[n] i, float[n,64] dy) => (float loss) <float[50,64] w> {
        y = Gather(w, i)  z = Mul(y, dy)  loss = ReduceSum<keepdims=0>(z) }""".replace("<float[50,64] w>", "")
    )
    weight = GENERATOR.standard_normal((50, 64)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    indices = GENERATOR.integers(-5, 5, 20000)
    dy = GENERATOR.integers(-4, 5, (20000, 64)).astype(np.float32)  # sums of these are exact
    expected = np.zeros((50, 64))
    np.add.at(expected, indices % 50, dy)
    training = build_gradient_model(model, ["w"])
    assert sum(node.op_type == "EmbeddingGrad" for node in training.graph.node) == 1
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    stock = onnxruntime.InferenceSession(training.SerializeToString(), options, ["CPUExecutionProvider"])
    for _ in range(3):
        feeds = {"i": indices, "dy": dy, "w": weight}
        np.testing.assert_array_equal(run(training, threads, **feeds)["w_grad"], expected)
        np.testing.assert_array_equal(stock.run(["w_grad"], feeds)[0], expected)


@pytest.mark.parametrize("attributes", ["", ", ceil_mode=1", ", pads=[1,0,0,1]", ", dilations=[2,1]"])
def test_an_image_network_without_the_plugin(attributes: str) -> None:
    """Batch normalization and pooling in one operator each, where that takes them; the same by their bodies, and
    by PyTorch."""
    model = parse(f"""g (float[3,4,9,10] x, float[4] s, float[4] b, float[4] m, float[4] v) => (float loss) {{
        n, m1, v1 = BatchNormalization<training_mode=1>(x, s, b, m, v)
        p = MaxPool<kernel_shape=[3,2], strides=[2,2]{attributes}>(n)
        q = Mul(p, p)  r = Mul(q, p)  loss = ReduceSum<keepdims=0>(r) }}""")
    training = build_gradient_model(model, ["x", "s", "b"])
    kinds = [node.op_type for node in training.graph.node]
    assert kinds.count("BatchNormGrad") == 1
    assert kinds.count("MaxPoolGrad") == ("dilations" not in attributes)
    feeds = {name: GENERATOR.standard_normal(4).astype(np.float32) for name in "sbmv"}
    feeds = {"x": GENERATOR.standard_normal((3, 4, 9, 10)).astype(np.float32), **feeds}
    stock = onnxruntime.InferenceSession(training.SerializeToString(), providers=["CPUExecutionProvider"])
    names = ["x_grad", "s_grad", "b_grad"]
    wide = {name: torch.tensor(feeds[name], dtype=torch.float64, requires_grad=True) for name in "xsb"}
    normalised = torch.nn.functional.batch_norm(wide["x"], None, None, wide["s"], wide["b"], training=True)
    padding = (0, 1, 1, 0) if "pads" in attributes else (0, 0, 0, 0)
    pooled = torch.nn.functional.max_pool2d(
        torch.nn.functional.pad(normalised, padding, value=-torch.inf),
        (3, 2),
        2,
        dilation=(2, 1) if "dilations" in attributes else 1,
        ceil_mode="ceil_mode" in attributes,
    )
    (pooled**3).sum().backward()
    for results in (run(training, **feeds), dict(zip(names, stock.run(names, feeds), strict=True))):
        for name in names:
            expected = wide[name[0]].grad.numpy()
            # some fifty roundings of the largest
            np.testing.assert_allclose(results[name], expected, rtol=0, atol=5e-6 * np.abs(expected).max())


CONVOLUTION = """g ({kind}[3,4,{size}] x, {kind}[6,{channels},3,2] w, {kind}[6] b) => ({kind} loss) {{
    y = Conv<{attributes}>(x, w, b)  q = Mul(y, y)  r = Mul(q, y)  loss = ReduceSum<keepdims=0>(r) }}"""


@pytest.mark.parametrize(
    ("attributes", "names", "options", "operators"),
    [
        ("pads=[1,0,2,1], strides=[2,1]", "xwb", {}, 1),
        ("dilations=[2,3]", "xwb", {"size": "H,W"}, 1),
        ("group=2, pads=[1,1,1,1]", "w", {"channels": 2}, 1),
        ("kernel_shape=[3,2]", "wb", {}, 1),
        ('auto_pad="SAME_LOWER", strides=[2,2]', "xw", {}, 1),
        ('auto_pad="SAME_LOWER", strides=[2,2]', "xw", {"size": "H,W"}, 0),
        ("pads=[1,0,2,1]", "xb", {}, 0),
        ("strides=[2,2]", "xwb", {"kind": "double"}, 0),
    ],
    ids=[
        "strided", "dilated", "grouped", "input not trained", "same", "same of unknown size", "weight not trained",
        "double",
    ],
)  # fmt: skip
def test_a_convolution_without_the_plugin(attributes: str, names: str, options: dict, operators: int) -> None:
    """In one operator where that takes it; the same by its body, and by PyTorch."""
    defaults = {"kind": "float", "size": "9,10", "channels": 4}
    text = CONVOLUTION.format(attributes=attributes, **(defaults | options))
    training = build_gradient_model(parse(text), list(names))
    kinds = [node.op_type for node in training.graph.node]
    assert kinds.count("ConvGrad") == operators
    assert ("ConvTranspose" in kinds or kinds.count("Conv") > 1) == (operators == 0)
    dtype = np.float64 if options.get("kind") == "double" else np.float32
    shapes = {"x": (3, 4, 9, 10), "w": (6, options.get("channels", 4), 3, 2), "b": (6,)}
    feeds = {name: GENERATOR.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    wide = {
        name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in feeds.items()
    }
    numbers = {
        key: [int(n) for n in value.split(",")]
        for key, value in re.findall(r"(\w+)=\[([\d,]+)\]", attributes)
    }
    top, left, bottom, right = numbers.get("pads", [1, 0, 1, 0] if "SAME" in attributes else [0] * 4)
    y = torch.nn.functional.conv2d(
        torch.nn.functional.pad(wide["x"], (left, right, top, bottom)), wide["w"], wide["b"],
        numbers.get("strides", 1), 0, numbers.get("dilations", 1), 2 if "group=2" in attributes else 1,
    )  # fmt: skip
    (y**3).sum().backward()
    wanted = [f"{name}_grad" for name in names]
    if dtype == np.float64:  # ONNX Runtime's Conv does not know double
        runs = [ReferenceEvaluator(training).run(wanted, feeds)]
    else:
        stock = onnxruntime.InferenceSession(training.SerializeToString(), providers=["CPUExecutionProvider"])
        runs = [stock.run(wanted, feeds), [run(training, **feeds)[name] for name in wanted]]
    for results in (dict(zip(wanted, results, strict=True)) for results in runs):
        for name in names:
            expected = wide[name].grad.numpy()
            # some hundred roundings of the largest, and those of y, whose square they are multiplied by
            np.testing.assert_allclose(
                results[f"{name}_grad"], expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name
            )


HALF = """g ({kind}[2,3,8] x, {kind}[8,8] w, {kind}[8] b, {kind}[8] gamma) => (float loss) {{
    a = MatMul(x, w)  h = Add(a, b)  t = Tanh(h)  n = LayerNormalization(t, gamma)  r = Add(n, x)  s = Softmax(r)
    wide = Cast<to=1>(s)  sq = Mul(wide, wide)  loss = ReduceSum<keepdims=0>(sq) }}"""


@pytest.mark.parametrize(
    ("kind", "dtype", "bits"), [("float16", np.float16, 11), ("bfloat16", ml_dtypes.bfloat16, 8)]
)
def test_16_bit_models_keep_each_gradient_in_its_tensors_type(kind: str, dtype: np.dtype, bits: int) -> None:
    names = ["x", "w", "b", "gamma"]
    shapes = {"x": (2, 3, 8), "w": (8, 8), "b": (8,), "gamma": (8,)}
    feeds = {name: (GENERATOR.standard_normal(shape) / 2).astype(dtype) for name, shape in shapes.items()}
    training = build_gradient_model(parse(HALF.format(kind=kind)), names)
    onnx.checker.check_model(training, full_check=True)
    wide = build_gradient_model(
        parse(HALF.format(kind="double").replace("to=1", "to=11").replace("float loss", "double loss")), names
    )
    expected = ReferenceEvaluator(wide).run(
        None, {name: value.astype(np.float64) for name, value in feeds.items()}
    )[1:]
    if kind == "float16":
        results = list(run(training, **feeds).values())[1:]
    else:  # ONNX Runtime's CPU kernels do not know bfloat16
        results = ReferenceEvaluator(training, new_ops=list(REFERENCE_OPS)).run(None, feeds)[1:]
    for name, gradient, reference in zip(names, results, expected, strict=True):
        assert gradient.dtype == dtype, name
        # a chain of some ten roundings to this many bits
        atol = 10 * 2.0**-bits * np.abs(reference).max()
        np.testing.assert_allclose(gradient.astype(np.float64), reference, rtol=0, atol=atol, err_msg=name)


def test_mixed_precision_casts_the_gradient_back() -> None:
    model = parse("""g (float[2,4] x, float[4,4] w) => (float loss) {
        xh = Cast<to=10>(x)  wh = Cast<to=10>(w)  y = MatMul(xh, wh)  z = Cast<to=1>(y)  loss = ReduceSum<keepdims=0>(z) }""")
    x, w = (
        GENERATOR.standard_normal((2, 4)).astype(np.float32),
        GENERATOR.standard_normal((4, 4)).astype(np.float32),
    )
    results = run(build_gradient_model(model, ["x", "w"]), x=x, w=w)
    assert results["w_grad"].dtype == np.float32
    np.testing.assert_allclose(
        results["w_grad"], np.repeat(x.sum(axis=0)[:, None], 4, axis=1), rtol=5e-3, atol=5e-3
    )


def test_integers_and_shapes_on_the_side_get_no_gradient_nodes() -> None:
    """An attention mask, a scale computed from a shape, an ArgMax used as a feature: all constants."""
    model = parse("""g (float[2,3,3] x, int64[2,3] mask, float[3] w) => (float loss) {
        axis = Constant<value_ints=[1]>()  m = Unsqueeze(mask, axis)  f = Cast<to=1>(m)  one = Constant<value_float=1.0>()
        inv = Sub(one, f)  low = Constant<value_float=-10000.0>()  bias = Mul(inv, low)
        last = Shape<start=2>(x)  d = Cast<to=1>(last)  root = Sqrt(d)
        y = Mul(x, w)  s = Div(y, root)  t = Add(s, bias)  p = Softmax(t)
        best = ArgMax<axis=2>(y)  feature = Cast<to=1>(best)  q = Mul(p, feature)  loss = ReduceSum<keepdims=0>(q) }""")
    training = build_gradient_model(model, ["w"])
    forward = {name for node in model.graph.node for name in node.output}
    backward = [node for node in training.graph.node if not set(node.output) & forward]
    assert not [node for node in backward if node.op_type in ("Cast", "ArgMax", "Shape")]
    x, w = GENERATOR.standard_normal((2, 3, 3)).astype(np.float32), np.array([1, 2, 3], np.float32)
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    gradient = run(training, x=x, w=w, mask=mask)["w_grad"]

    def loss(w: np.ndarray) -> float:
        y = x.astype(np.float64) * w
        t = y / np.sqrt(3) + (1 - mask[:, None]) * -1e4
        p = np.exp(t - t.max(-1, keepdims=True))
        return float((p / p.sum(-1, keepdims=True) * np.argmax(y, 2)[:, :, None]).sum())

    expected = [(loss(w + 1e-6 * unit) - loss(w - 1e-6 * unit)) / 2e-6 for unit in np.eye(3)]
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5)


def test_rows_that_are_masked_as_a_whole_have_no_gradient_where_the_model_replaces_their_nan() -> None:
    model = parse("""g (float[3,4] x, float[3,4] mask, float[3,4] dy) => (float loss) {
        m = Add(x, mask)  p = Softmax(m)  nan = IsNaN(p)  zero = Constant<value_float=0.0>()  q = Where(nan, zero, p)
        z = Mul(q, dy)  loss = ReduceSum<keepdims=0>(z) }""")
    x, dy = (GENERATOR.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
    mask = np.zeros((3, 4), np.float32)
    mask[1] = -np.inf
    gradient = run(build_gradient_model(model, ["x"]), x=x, mask=mask, dy=dy)["x_grad"]
    soft = np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True)
    expected = soft * (dy - (dy * soft).sum(axis=1, keepdims=True))
    expected[1] = 0
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("opset", [13, 17, 18, 21])
def test_the_rms_norm_that_the_runtime_keeps_in_the_default_domain(opset: int) -> None:
    """The standard does not know SimplifiedLayerNormalization; the runtime's optimizer writes it."""
    model = parse(
        """g (float[2,3,4] x, float[4] s, float[2,3,4] dy) => (float loss) {
        y = SimplifiedLayerNormalization<axis=-1, epsilon=0.1>(x, s)
        z = Mul(y, dy)  loss = ReduceSum<keepdims=0>(z) }""",
        opset,
    )
    feeds = {
        name: GENERATOR.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": (2, 3, 4), "s": (4,), "dy": (2, 3, 4)}.items()
    }
    training = build_gradient_model(model, ["x", "s"])
    assert [(entry.domain, entry.version) for entry in training.opset_import] == [("", max(opset, 18))]
    results = run(training, **feeds)
    x, s, dy = (value.astype(np.float64) for value in feeds.values())
    rstd = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 0.1)
    g = dy * s
    expected = rstd * (g - x * rstd**2 * (g * x).mean(axis=-1, keepdims=True))
    np.testing.assert_allclose(results["x_grad"], expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(results["s_grad"], (dy * x * rstd).sum(axis=(0, 1)), rtol=0, atol=2e-6)


def test_token_numbers_truth_values_and_places_get_no_gradient_nodes() -> None:
    """Token numbers that are looked up, a mask of comparisons, and the places that TopK returns, as a feature."""
    model = parse("""g (int64[2,3] tokens) => (float loss) {
        e = Gather(w, tokens)  pad = Constant<value_int=0>()  same = Equal(tokens, pad)  real = Not(same)
        kept = Cast<to=1>(real)  last = Constant<value_ints=[2]>()  m = Unsqueeze(kept, last)  y = Mul(e, m)
        two = Constant<value_ints=[2]>()  best, places = TopK<axis=2>(y, two)  f = Cast<to=1>(places)
        z = Mul(best, f)  loss = ReduceSum<keepdims=0>(z) }""")
    w = GENERATOR.standard_normal((5, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    training = build_gradient_model(model, ["w"])
    onnx.checker.check_model(training, full_check=True)
    kinds = {
        info.name: info.type.tensor_type.elem_type
        for info in onnx.shape_inference.infer_shapes(training).graph.value_info
    }
    gradients = [name for name in kinds if name.endswith("_grad")]
    assert gradients and all(kinds[name] == onnx.TensorProto.FLOAT for name in gradients)
    with pytest.raises(GradientError, match="'tokens' \\(int64\\)"):
        build_gradient_model(model, ["tokens"])
    tokens = np.array([[1, 0, 4], [4, 0, 2]])
    gradient = run(training, tokens=tokens, w=w)["w_grad"]
    expected = np.zeros((5, 4))
    for token in tokens.reshape(-1):
        if token:
            places = np.argsort(-w[token])[:2]
            expected[token, places] += places
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("declared", ["loss", "loss, p"])
@pytest.mark.parametrize("weighted", [False, True])
def test_ignored_labels_of_every_position_and_weight(
    reduction: str, ignored: int, declared: str, weighted: bool
) -> None:
    """Logits [batch, classes, positions]: the gradient is exactly zero where the label is ignored, and the mean is over the weights that count."""
    output = "each" if reduction == "none" else "loss"
    model = parse(f"""g (float[2,5,3] x, int64[2,3] l{", float[5] w" if weighted else ""}) => (float loss) {{
        {declared.replace("loss", output)} = SoftmaxCrossEntropyLoss<reduction="{reduction}", ignore_index={ignored}>(x, l{", w" if weighted else ""})
        {"loss = ReduceSum<keepdims=0>(each)" if reduction == "none" else ""} }}""")
    x = GENERATOR.standard_normal((2, 5, 3)).astype(np.float32)
    labels = np.array([[1, ignored, 4], [ignored, 0, 3]])
    weights = np.array([0.5, 2, 3, 1, 0.25], np.float32) if weighted else np.ones(5, np.float32)
    gradient = run(build_gradient_model(model, ["x"]), x=x, l=labels, w=weights)["x_grad"]
    soft = np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True)
    scale = np.where(labels == ignored, 0.0, weights[labels % 5])
    if reduction == "mean":
        scale = scale / scale.sum()
    expected = (soft - np.eye(5)[labels % 5].transpose(0, 2, 1)) * scale[:, None]
    np.testing.assert_array_equal(gradient.transpose(0, 2, 1)[labels == ignored], 0)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("declared", ["loss", "loss, p"])
def test_positions_that_are_all_ignored_have_gradients_of_zeros(reduction: str, declared: str) -> None:
    model = parse(f"""g (float[2,5,3] x, int64[2,3] l, float[5] w) => (float loss) {{
        {declared} = SoftmaxCrossEntropyLoss<reduction="{reduction}", ignore_index=2>(x, l, w) }}""")
    x = GENERATOR.standard_normal((2, 5, 3)).astype(np.float32)
    feeds = {"l": np.full((2, 3), 2), "w": np.ones(5, np.float32)}
    np.testing.assert_array_equal(run(build_gradient_model(model, ["x"]), x=x, **feeds)["x_grad"], 0)


def test_scalars_which_the_fused_operators_do_not_take() -> None:
    model = parse(
        """g (float[4] w, int64 i) => (float loss) {
        a = Gather(w, i)  b = Sigmoid(a)  c = Gelu(b)  loss = Relu(c) }""",
        opset=20,
    )
    w = GENERATOR.standard_normal(4).astype(np.float32)
    gradient = run(build_gradient_model(model, ["w"]), w=w, i=np.array(2))["w_grad"]
    s = 1 / (1 + np.exp(-w[2].astype(np.float64)))
    slope = (1 + erf(s / np.sqrt(2))) / 2 + s * np.exp(-(s**2) / 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(gradient, np.eye(4)[2] * slope * s * (1 - s), rtol=1e-5)
