"""Parameters keep their identity through what exporters do to them: folding, transposing, renaming, merging."""

# ruff: noqa: E501  (models in ONNX's text format read better on one line)

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from ort_ops.gradient import GradientError, build_gradient_model

B, S, H = 2, 3, 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(H, H)
        self.norm = torch.nn.LayerNorm(H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))


class Encoder(torch.nn.Module):
    """Two blocks, whose scales all start as ones and whose shifts as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * dy).sum()


def export(
    model: Encoder, inputs: tuple[torch.Tensor, ...], path: Path, dynamo: bool, folded: bool
) -> onnx.ModelProto:
    form = {"optimize": folded} if dynamo else {"do_constant_folding": folded, "opset_version": 17}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        torch.onnx.export(
            model,
            inputs,
            str(path),
            input_names=["x", "dy"],
            output_names=["loss"],
            dynamo=dynamo,
            verbose=False,
            **form,
        )
    return onnx.load(path)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("folded", [True, False], ids=["folded", "plain"])
def test_an_exported_encoder_by_the_names_of_its_module(tmp_path: Path, dynamo: bool, folded: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Encoder().eval(), (torch.randn(B, S, H), torch.randn(B, S, H))
    exported = export(model, inputs, tmp_path / "encoder.onnx", dynamo, folded)
    model(*inputs).backward()
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in exported.graph.initializer}
    lost = sorted(expected.keys() - stored.keys())
    if lost:  # merged with equal ones, or replaced by transposed ones: the builder says which
        with pytest.raises(GradientError) as refused:
            build_gradient_model(exported, list(expected))
        assert all(repr(name) in str(refused.value) for name in lost)
    kept = [name for name in expected if name in stored]
    assert {"blocks.0.norm.weight", "blocks.0.norm.bias"} <= set(kept)
    for kind in ("weight", "bias"):
        if f"blocks.1.norm.{kind}" in lost:  # merged with the first block's, as it has the same contents
            expected[f"blocks.0.norm.{kind}"] += expected[f"blocks.1.norm.{kind}"]
    training = build_gradient_model(exported, kept)
    session = onnxruntime.InferenceSession(training.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": inputs[0].numpy(), "dy": inputs[1].numpy(), **{name: stored[name] for name in kept}}
    gradients = session.run([f"{name}_grad" for name in kept], feeds)
    for name, gradient in zip(kept, gradients, strict=True):
        # some twenty float32 stages
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=2e-5, err_msg=name)


NORMS = """<ir_version: 8, opset_import: ["": 18]> g (float[2,3,4] x, float[2,3,4] dy) => (float loss) <float[4] g1 = {{1, 1, 1, 1}}, float[4] g2 = {{1, 1, 1, 1}}> {{
    a = LayerNormalization(x, g1)  t = Tanh(a)  b = LayerNormalization(t, {second})  z = Mul(b, dy)  loss = ReduceSum<keepdims=0>(z) }}"""


def test_equal_scales_stay_apart_and_a_merged_one_gets_the_sum() -> None:
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal((2, 3, 4)).astype(np.float32) for name in ("x", "dy")}
    ones = np.ones(4, np.float32)

    def gradients(second: str, names: list[str]) -> list[np.ndarray]:
        training = build_gradient_model(onnx.parser.parse_model(NORMS.format(second=second)), names)
        session = onnxruntime.InferenceSession(
            training.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        return session.run([f"{name}_grad" for name in names], {**feeds, **dict.fromkeys(names, ones)})

    first, second = gradients("g2", ["g1", "g2"])
    (merged,) = gradients("g1", ["g1"])
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_allclose(merged, first + second, rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_stored_transposed_has_its_gradient_in_the_stored_layout() -> None:
    generator = np.random.default_rng(0)
    feeds = {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": (3, 4), "dy": (3, 2)}.items()
    }
    weight = generator.standard_normal((4, 2)).astype(np.float32)
    head = (
        '<ir_version: 8, opset_import: ["": 18]> g (float[3,4] x, float[3,2] dy, float[{}] w) => (float loss)'
    )
    tail = "z = Mul(y, dy)  loss = ReduceSum<keepdims=0>(z)"
    folded = f"{head.format('4,2')} {{ y = MatMul(x, w)  {tail} }}"
    plain = f"{head.format('2,4')} {{ t = Transpose<perm=[1, 0]>(w)  y = MatMul(x, t)  {tail} }}"
    results = []
    for text, stored in ((folded, weight), (plain, weight.T.copy())):
        training = build_gradient_model(onnx.parser.parse_model(text), ["w"])
        session = onnxruntime.InferenceSession(
            training.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        given = {value.name for value in session.get_inputs()}
        feed = {name: value for name, value in {**feeds, "w": stored}.items() if name in given}
        (gradient,) = session.run(["w_grad"], feed)
        assert gradient.shape == stored.shape
        results.append(gradient)
    np.testing.assert_allclose(results[0], feeds["x"].T @ feeds["dy"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[1].T, results[0], rtol=1e-5, atol=1e-6)
