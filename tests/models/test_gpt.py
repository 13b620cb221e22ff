"""The GPT graph against its PyTorch twin: loss, gradients, and the text model with all it does around the
trunk.
"""

from __future__ import annotations

import gpt
import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ort_ops
from ort_ops.gradient import build_gradient_model
from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.checkpoint import Checkpoint
from ort_ops.training.optimizer import AdamW, build_optimizer_model
from ort_ops.training.training_graphs import build_training_graphs

torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")
import torch_gpt  # noqa: E402 (needs torch)

torch.set_num_threads(1)  # on models this small more threads only wait for each other

ALPHABET = list("\n abcé—")
CONFIG = gpt.GptConfig(vocabulary=len(ALPHABET), context=8, width=12, heads=3, layers=2)
BATCH = 5


def large_parameters() -> dict[str, np.ndarray]:
    """Not the small initial values, whose attention is nearly uniform and would hide a wrong mask or head."""
    generator = np.random.default_rng(5)
    return {
        name: np.asarray(generator.normal(0.0, 0.6, shape) + name.endswith("norm.weight"), np.float32)
        for name, shape in gpt.parameter_shapes(CONFIG).items()
    }


def batch(size: int = BATCH) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(6)
    tokens = generator.integers(0, CONFIG.vocabulary, (size, CONFIG.context + 1))
    return {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


def torch_parameters() -> dict[str, torch.nn.Parameter]:
    """In float64: the twin is the oracle, on the same float32 values."""
    return {n: torch.nn.Parameter(torch.from_numpy(v).double()) for n, v in large_parameters().items()}


def torch_loss(parameters: dict[str, torch.nn.Parameter], feeds: dict[str, np.ndarray]) -> torch.Tensor:
    tensors = {name: torch.from_numpy(value) for name, value in feeds.items()}
    return torch_gpt.loss(CONFIG, parameters, tensors["tokens"], tensors["targets"])


def gradient_model() -> onnx.ModelProto:
    parameters = large_parameters()
    return build_gradient_model(
        gpt.build_loss_model(CONFIG, parameters, BATCH), requires_grad=list(parameters)
    )


def plain_session(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_initial_parameters_depend_on_the_seed_alone_and_start_at_the_loss_of_a_guess() -> None:
    first, again, other = (gpt.initial_parameters(CONFIG, seed) for seed in (1, 1, 2))
    for name, value in first.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, again[name])
    assert not np.array_equal(first["head.weight"], other["head.weight"])
    (loss,) = plain_session(gpt.build_loss_model(CONFIG, first)).run(None, batch(64))
    assert loss == pytest.approx(np.log(CONFIG.vocabulary), rel=0.02)


@pytest.mark.parametrize("declared", ["batch", BATCH])
def test_loss_agrees_with_pytorch(declared: str | int) -> None:
    model = gpt.build_loss_model(CONFIG, large_parameters(), declared)
    onnx.checker.check_model(model, full_check=True)
    (loss,) = plain_session(model).run(None, batch())
    assert loss.shape == ()
    # A mean of 40 cross entropies, each from about ten float32 stages on values of size one to ten.
    assert float(loss) == pytest.approx(torch_loss(torch_parameters(), batch()).item(), rel=2e-6)


def test_gradients_agree_with_pytorch() -> None:
    parameters = torch_parameters()
    torch_loss(parameters, batch()).backward()
    model = gradient_model()
    assert [output.name for output in model.graph.output] == ["loss", *(f"{n}_grad" for n in parameters)]
    options = ort.SessionOptions()
    ort_ops.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    loss, *gradients = session.run(None, {**batch(), **large_parameters()})
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        assert parameter.grad is not None
        expected = parameter.grad.numpy()
        assert np.abs(expected).max() > 1e-3, f"the gradient of {name} is too small to prove anything"
        # A chain of some twenty float32 stages, each with sums of up to 48 terms: well below 200 roundings.
        np.testing.assert_allclose(
            gradient, expected, rtol=0, atol=200 * 2.0**-24 * np.abs(expected).max(), err_msg=name
        )


def test_twenty_steps_of_training_agree_with_pytorch() -> None:
    """Gradients accumulated over two batches a step, AdamW with clipping and decay, a learning rate that
    changes."""
    first, rates = large_parameters(), [0.003 * (1 - step / 40) for step in range(20)]
    decayed = {name for name in first if not name.endswith(("bias", "norm.weight"))}
    graphs = build_training_graphs(gpt.build_loss_model(CONFIG, first), ["loss"], requires_grad=list(first))
    # With a large epsilon the rounding of a small gradient stays small in the update: gradients are clipped
    # to 1 and off by up to 200 * 2^-24 (as in the test of the gradients), so an update by rate * 0.0012.
    epsilon = 0.01
    rule = AdamW(
        epsilon=epsilon, weight_decay=0.1, no_decay=["*.bias", "*norm.weight"], max_gradient_norm=1.0
    )
    shapes = {name: (value.shape, onnx.TensorProto.FLOAT) for name, value in first.items()}
    module = Module(graphs.training_model, CheckpointState(Checkpoint(first)), graphs.eval_model)
    optimizer = Optimizer(build_optimizer_model(shapes, rule), module)

    parameters = torch_parameters()
    twin = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in first if name in decayed], "weight_decay": 0.1},
            {"params": [parameters[name] for name in first if name not in decayed], "weight_decay": 0.0},
        ],
        eps=epsilon,
    )
    for rate in rates:
        optimizer.set_learning_rate(rate)
        for group in twin.param_groups:
            group["lr"] = rate
        twin.zero_grad()
        for size in (BATCH, 3):
            expected = torch_loss(parameters, batch(size))
            expected.backward()
            assert float(module(batch(size))) == pytest.approx(expected.item(), rel=2e-5)
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        twin.step()
        optimizer.step()
        module.lazy_reset_grad()
    assert float(module.eval()(batch())) < 0.6 * torch_loss(torch_parameters(), batch()).item()
    for name, parameter in parameters.items():
        got, wanted = module.state.parameters[name].data, parameter.detach().numpy()
        if name.endswith(
            "query_key_value.bias"
        ):  # the keys' third shifts no attention: its gradient is rounding
            width = CONFIG.width
            got, wanted = (np.delete(each, slice(width, 2 * width)) for each in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=sum(rates) * 0.0012, err_msg=name)


def test_every_norm_is_differentiated_by_the_fused_operator_with_the_residual_gradient() -> None:
    model = gradient_model()
    fused = [node for node in model.graph.node if node.op_type == "AddLayerNormGrad"]
    assert len(fused) == 2 * CONFIG.layers + 1
    with_residual = [node for node in fused if len(node.input) > 6 and node.input[6]]
    # The last norm's input goes nowhere else, so there only is no residual gradient to add.
    assert len(with_residual) == 2 * CONFIG.layers


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        ("a", "a"),
        ("ab\n", "ab\n"),
        (" \n  é—", " \n  é—"),
        ("abcabcab", "abcabcab"),
        ("c\n é—abcabcab", "abcabcab"),
        ("aXb", "a b"),
    ],
)
def test_text_model_reads_the_last_characters(text: str, read_as: str) -> None:
    session = plain_session(gpt.build_text_model(CONFIG, large_parameters(), ALPHABET))
    assert session.get_modelmeta().custom_metadata_map["alphabet"] == "".join(ALPHABET)
    (logits,) = session.run(["logits"], {"text": np.array([text])})
    tokens = torch.tensor([[ALPHABET.index(character) for character in read_as]])
    with torch.no_grad():
        expected = torch_gpt.logits(CONFIG, torch_parameters(), tokens)[0, -1].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert logits.shape == (len(ALPHABET),)


def test_width_must_be_a_multiple_of_heads() -> None:
    with pytest.raises(ValueError, match="width must be a multiple of heads; got 10 and 4 heads"):
        gpt.GptConfig(vocabulary=5, width=10, heads=4)
