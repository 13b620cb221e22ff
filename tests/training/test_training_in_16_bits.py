"""Training in 16 bits with float32 parameters, from artifacts to the last step, beside float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from ort_ops.training import artifacts
from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.optimizer import AdamW, LossScaling

STEPS = 40
CLASSES = 4

# One block of a transformer, with what a classifier needs around it.
FORWARD = """
<ir_version: 9, opset_import: ["" : 20]>
block (float[N,6,16] x) => (float[N,4] logits)
{
    n1 = LayerNormalization(x, gamma1, beta1)
    qkv = MatMul(n1, w_qkv)
    q, k, v = Split <axis = 2, num_outputs = 3> (qkv)
    kt = Transpose <perm = [0, 2, 1]> (k)
    scores = MatMul(q, kt)
    scaled = Mul(scores, quarter)
    odds = Softmax(scaled)
    mixed = MatMul(odds, v)
    projected = MatMul(mixed, w_out)
    r1 = Add(x, projected)
    n2 = LayerNormalization(r1, gamma2, beta2)
    wide = MatMul(n2, w_up)
    biased = Add(wide, b_up)
    active = Gelu(biased)
    narrow = MatMul(active, w_down)
    r2 = Add(r1, narrow)
    pooled = ReduceMean <keepdims = 0> (r2, axis)
    logits = Gemm <transB = 1> (pooled, w_head, b_head)
}"""


def forward_model() -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    shapes = {
        "w_qkv": (16, 48),
        "w_out": (16, 16),
        "w_up": (16, 32),
        "b_up": (32,),
        "w_down": (32, 16),
        "w_head": (CLASSES, 16),
        "b_head": (CLASSES,),
    }
    tensors = {name: generator.normal(size=shape) / 4 for name, shape in shapes.items()}
    tensors |= {name: np.ones(16) for name in ("gamma1", "gamma2")}
    tensors |= {name: np.zeros(16) for name in ("beta1", "beta2")}
    model = onnx.parser.parse_model(FORWARD)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in tensors.items()
    )
    constants = {"quarter": np.float32(0.25), "axis": np.array([1])}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    return model


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences around one of four centres, which is their class."""
    centres = np.random.default_rng(99).normal(size=(CLASSES, 6, 16))
    generator = np.random.default_rng(step)
    labels = generator.integers(0, CLASSES, 24)
    x = centres[labels] + generator.normal(size=(24, 6, 16))
    return x.astype(np.float32), labels


class Run:
    """A training of the block in `folder`, and what it saw."""

    def __init__(self, folder: Path, **settings: object) -> None:
        artifacts.generate_artifacts(
            forward_model(),
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=AdamW(max_gradient_norm=1.0),
            artifact_directory=folder,
            frozen_params=["quarter"],
            **settings,  # type: ignore[arg-type]
        )
        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(1e-2)
        self.losses: list[float] = []
        self.reports: list[dict[str, np.ndarray]] = []

    def step(self) -> None:
        self.losses.append(float(self.module(*batch(len(self.losses)))))
        self.reports.append(self.optimizer.step())
        self.module.lazy_reset_grad()

    def parameters(self) -> dict[str, bytes]:
        return {name: parameter.data.tobytes() for name, parameter in self.state.parameters}

    def evaluate(self) -> float:
        self.module.eval()
        return float(self.module(*batch(1000)))


@pytest.fixture(scope="module")
def float_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("float"))
    for _ in range(STEPS):
        run.step()
    return run


@pytest.mark.parametrize(("compute_type", "rounding"), [("bfloat16", 2.0**-9), ("float16", 2.0**-11)])
def test_converges_next_to_float32(
    compute_type: str, rounding: float, float_run: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path, compute_type=compute_type)
    types = {
        v.name: v.type.tensor_type.elem_type for v in onnx.load(tmp_path / "training_model.onnx").graph.output
    }
    assert set(types.values()) == {onnx.TensorProto.FLOAT}
    for _ in range(STEPS):
        run.step()
    assert not any(report.get("skipped", False) for report in run.reports)
    assert ("skipped" in run.reports[0]) == (compute_type == "float16")
    first = float_run.losses[0]
    assert float_run.losses[-1] < first / 4 and run.losses[-1] < first / 4
    differences = np.abs(np.subtract(run.losses, float_run.losses))
    # The first loss is one forward pass: about ten independent roundings of values that make logits of about
    # its size. Parameters then move by gradients with another ten on their way.
    assert 0 < differences[0] <= np.sqrt(10) * rounding * first
    assert differences.max() <= np.sqrt(20) * rounding * first
    assert abs(run.evaluate() - float_run.evaluate()) <= np.sqrt(20) * rounding * first
    assert {name: len(data) for name, data in run.parameters().items()} == {
        name: len(data) for name, data in float_run.parameters().items()
    }


def test_an_overflow_is_skipped_and_the_scale_halves_then_grows(tmp_path: Path) -> None:
    scaling = LossScaling(initial_scale=2.0**24, growth_interval=8)
    run = Run(tmp_path, compute_type="float16", loss_scale=scaling)
    scale, good, updates = 2.0**24, 0, 0
    for _ in range(STEPS):
        before = run.parameters()
        run.step()
        if run.reports[-1]["skipped"]:
            assert run.parameters() == before
            scale, good = scale / 2, 0
        else:
            changed = {name for name, value in run.parameters().items() if value != before[name]}
            assert changed == set(before) - {"quarter"}
            good, updates = good + 1, updates + 1
            if good == 8:
                scale, good = scale * 2, 0
        assert run.optimizer.step_count == updates
    skipped = [bool(report["skipped"]) for report in run.reports]
    # float16 ends at 65504: with a loss of about 1 the first scales are too large, and the scale is tried
    # again after eight good steps.
    assert all(skipped[:4]) and not all(skipped[:12])
    assert skipped[skipped.index(False) :].count(True) >= 1
    assert run.losses[-1] < run.losses[0] / 2
    saved = tmp_path / "saved"
    CheckpointState.save_checkpoint(run.state, saved, include_optimizer_state=True)
    loaded = CheckpointState.load_checkpoint(saved)
    assert float(loaded.training_state.optimizer_state["loss_scale"].read()) == scale
