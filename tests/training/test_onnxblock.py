"""Blocks: elementary ones compute what their names say; losses written for onnxruntime-training build
unchanged and give its losses and gradients; what is misused is said.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import custom_losses
import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from old_runtime import needs_old_runtime, run_in_old_runtime

from ort_ops.training import onnxblock
from ort_ops.training.api import CheckpointState, Module
from ort_ops.training.artifacts import LossType, build_artifacts
from ort_ops.training.checkpoint import Checkpoint, load_checkpoint
from ort_ops.training.losses import label_checks
from ort_ops.training.onnxblock.optim import rule_of
from ort_ops.training.optimizer import SGD, AdamW, AdamWForm, build_optimizer_model

blocks = onnxblock.blocks

# Float32 rounding of a few dozen terms, relative to the largest of them.
TOLERANCE = 2e-6

X = np.array([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], np.float32)
Y = np.array([[2.0, 0.5, -0.5], [1.0, -4.0, 2.0]], np.float32)


def two_inputs(opset: int = 18) -> onnx.ModelProto:
    """A model that returns its inputs a and b."""
    make = onnx.helper.make_tensor_value_info
    kind = (onnx.TensorProto.FLOAT, ["N", 3])
    nodes = [onnx.helper.make_node("Identity", [name], [name.upper()]) for name in "ab"]
    graph = onnx.helper.make_graph(
        nodes, "g", [make("a", *kind), make("b", *kind)], [make("A", *kind), make("B", *kind)]
    )
    imports = [onnx.helper.make_opsetid("", opset)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)


class Forward(onnxblock.ForwardBlock):
    """Any function of names as a block."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def build(self, *names: str) -> Any:
        return self._function(*names)


def built(function: Callable[..., Any], model: onnx.ModelProto | None = None) -> onnx.ModelProto:
    block = Forward(function)
    with onnxblock.base(model or two_inputs()):
        block("A", "B")
    return block.to_model_proto()


# -- elementary blocks ---------------------------------------------------------------------------------------

ELEMENTARY: dict[str, tuple[Callable[[str, str], str], Callable[[np.ndarray, np.ndarray], Any]]] = {
    "Add": (blocks.Add(), lambda a, b: a + b),
    "Sub": (blocks.Sub(), lambda a, b: a - b),
    "Mul": (blocks.Mul(), lambda a, b: a * b),
    "Div": (blocks.Div(), lambda a, b: a / b),
    "Pow": (lambda a, b: blocks.Pow(3.0)(a), lambda a, b: a**3),
    "ReduceMean": (lambda a, b: blocks.ReduceMean()(a), lambda a, b: a.mean(keepdims=True)),
    "ReduceMean flat": (lambda a, b: blocks.ReduceMean(keepdims=False)(a), lambda a, b: a.mean()),
    "ReduceSum": (lambda a, b: blocks.ReduceSum()(a), lambda a, b: a.sum(keepdims=True)),
    "ReduceSum flat": (lambda a, b: blocks.ReduceSum(False)(a), lambda a, b: a.sum()),
    "Sigmoid": (lambda a, b: blocks.Sigmoid()(a), lambda a, b: 1 / (1 + np.exp(-a))),
    "Log": (lambda a, b: blocks.Log()(blocks.Abs()(a)), lambda a, b: np.log(np.abs(a))),
    "Neg": (lambda a, b: blocks.Neg()(b), lambda a, b: -b),
    "Abs": (lambda a, b: blocks.Abs()(b), lambda a, b: np.abs(b)),
    "Constant": (lambda a, b: blocks.Constant(0.3)(), lambda a, b: np.array([0.3], np.float32)),
    "Clip": (lambda a, b: blocks.Clip(-1.0, 0.4)(a), lambda a, b: np.clip(a, -1, 0.4)),
    "Clip below": (lambda a, b: blocks.Clip(clip_min=-1.0)(a), lambda a, b: np.maximum(a, -1)),
    "Clip above": (lambda a, b: blocks.Clip(clip_max=0.4)(a), lambda a, b: np.minimum(a, np.float32(0.4))),
    "Cast": (lambda a, b: blocks.Cast(onnx.TensorProto.INT64)(a), lambda a, b: a.astype(np.int64)),
    "ReduceAllL2": (
        lambda a, b: blocks.ReduceAllL2()(a, b),
        lambda a, b: np.sqrt((a**2).sum() + (b**2).sum()).reshape(1),
    ),
    "LabelEncoder": (
        lambda a, b: blocks.LabelEncoder(keys_floats=[1.0, 3.0], values_floats=[7.0, 8.0], default_float=9.0)(
            a
        ),
        lambda a, b: np.where(a == 1, 7, np.where(a == 3, 8, 9)).astype(np.float32),
    ),
}


@pytest.mark.parametrize("opset", [12, 14, 18, 21])
@pytest.mark.parametrize("name", ELEMENTARY)
def test_an_elementary_block_is_its_formula(name: str, opset: int) -> None:
    build, formula = ELEMENTARY[name]
    model = built(build, two_inputs(opset))
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"a": X, "b": Y})
    expected = formula(X, Y)
    assert result.shape == expected.shape and result.dtype == expected.dtype
    np.testing.assert_allclose(result, expected, rtol=TOLERANCE)


def test_sequences_and_names_are_passed_on() -> None:
    model = built(lambda a, b: blocks.SequenceConstruct()(a, b))
    (result,) = onnx.reference.ReferenceEvaluator(model).run(None, {"a": X, "b": Y})
    np.testing.assert_array_equal(result, [X, Y])
    with onnxblock.base(two_inputs()):
        assert blocks.PassThrough()("A", "B") == ("A", "B")


@pytest.mark.parametrize("bias", [True, False])
def test_linear_brings_its_parameters(bias: bool) -> None:
    np.random.seed(3)
    model = built(lambda a, b: blocks.Linear(3, 2, bias=bias, alpha=0.5, beta=2.0)(a))
    tensors = [onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer]
    np.random.seed(3)
    weight = np.random.randn(3, 2).astype(np.float32)
    np.testing.assert_array_equal(tensors[0], weight)
    assert len(tensors) == (2 if bias else 1)
    (result,) = onnx.reference.ReferenceEvaluator(model).run(None, {"a": X, "b": Y})
    np.testing.assert_allclose(
        result, 0.5 * X @ weight + (2 * tensors[1] if bias else 0), rtol=1e-5, atol=1e-6
    )


def test_an_input_can_be_like_any_value() -> None:
    """Also like one that is neither an input nor an output of the graph."""

    def build(a: str, b: str) -> str:
        inner = blocks.Cast(onnx.TensorProto.DOUBLE)(a)
        return blocks.Add()(inner, blocks.InputLike(inner)("other"))

    model = built(build)
    other = next(value for value in model.graph.input if value.name == "other")
    assert other.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE
    assert [d.dim_param or d.dim_value for d in other.type.tensor_type.shape.dim] == ["N", 3]


# -- losses written for onnxruntime-training -----------------------------------------------------------------


def train_step(name: str) -> dict[str, np.ndarray]:
    """Results and gradients of one step with the loss `name` of custom_losses, as peer_losses_script.py
    records them."""
    make, inputs, trained = custom_losses.LOSSES[name]
    np.random.seed(0)
    made = build_artifacts(custom_losses.forward_model(), requires_grad=trained, loss=make(onnxblock))
    model = made.training_model
    batch = {key: custom_losses.batch()[key] for key in inputs}
    assert [value.name for value in model.graph.input] == [*inputs, *trained]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.output]
    values = dict(zip(names, session.run(None, {**made.checkpoint.parameters, **batch}), strict=True))
    results = {f"{name} {parameter}": values[f"{parameter}_grad"] for parameter in trained}
    results[f"{name} result 0"] = values[names[0]]
    if name == "encoded_labels":
        results[f"{name} result 1"] = values["z"]
    return results


def torch_losses() -> dict[str, Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]]:
    """The same losses in PyTorch; the last argument has the batch and the parameters."""

    def focal(y: torch.Tensor, z: torch.Tensor, v: dict[str, Any]) -> torch.Tensor:
        p = torch.sigmoid(y).clamp(1e-4, 1 - 1e-4)
        return -(v["binary"] * (1 - p) ** 2 * p.log() + (1 - v["binary"]) * p**2 * (1 - p).log()).mean()

    def projected(y: torch.Tensor, z: torch.Tensor, v: dict[str, Any]) -> torch.Tensor:
        np.random.seed(0)
        weight, bias = torch.tensor(np.random.randn(2, 3)), torch.tensor(np.random.randn(3))
        return ((0.5 * z @ weight + bias + y - v["target"]) ** 2).sum()

    return {
        "weighted_sum": lambda y, z, v: 0.4 * F.mse_loss(y, v["target"]) + 0.6 * F.l1_loss(z, v["target2"]),
        "focal": focal,
        "with_parameters": projected,
        "regularised": lambda y, z, v: (
            2 * F.cross_entropy(y, v["labels"], ignore_index=2) + v["w1"].abs().sum() / 50
        ),
        "own_nodes": lambda y, z, v: torch.cosh(y - v["target"]).log().mean(),
        "encoded_labels": lambda y, z, v: F.cross_entropy(y, 12 - v["codes"]),
    }


@pytest.mark.parametrize("name", custom_losses.LOSSES)
def test_custom_losses_are_pytorchs(name: str) -> None:
    results = train_step(name)
    values: dict[str, Any] = {
        key: torch.tensor(value if value.dtype == np.int64 else value.astype(np.float64))
        for key, value in custom_losses.batch().items()
    }
    for tensor in custom_losses.forward_model().graph.initializer:
        value = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        values[tensor.name] = torch.tensor(value, requires_grad=True)
    hidden = torch.tanh(values["x"] @ values["w1"] + values["b1"])
    y, z = hidden @ values["w2"], hidden @ values["w3"]
    loss = torch_losses()[name](y, z, values)
    loss.backward()
    np.testing.assert_allclose(results[f"{name} result 0"].reshape(()), loss.item(), rtol=1e-5)
    for parameter in custom_losses.LOSSES[name][2]:
        expected = values[parameter].grad.numpy()
        np.testing.assert_allclose(
            results[f"{name} {parameter}"], expected, rtol=0, atol=1e-5 * np.abs(expected).max()
        )


@pytest.fixture(scope="module")
def peer_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("peer")
    run_in_old_runtime(Path(__file__).with_name("peer_losses_script.py"), folder)
    return dict(np.load(folder / "peer_losses.npz"))


@needs_old_runtime
@pytest.mark.parametrize("name", custom_losses.LOSSES)
def test_custom_losses_are_those_of_onnxruntime_training(
    name: str, peer_results: dict[str, np.ndarray]
) -> None:
    expected = {key: value for key, value in peer_results.items() if key.startswith(f"{name} ")}
    results = train_step(name)
    assert set(results) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(
            results[key].reshape(value.shape), value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=key
        )


@pytest.mark.parametrize(
    "module, names",
    [
        (
            onnxblock,
            "Block ForwardBlock TrainingBlock base blocks custom_op_library empty_base loss optim "
            "load_checkpoint_to_model save_checkpoint",
        ),
        (
            onnxblock.blocks,
            "Abs Add Block Cast Clip Constant Div InputLike LabelEncoder Linear Log Mul Neg PassThrough Pow "
            "ReduceAllL2 ReduceMean ReduceSum SequenceConstruct Sigmoid Sub",
        ),
        (onnxblock.loss, "BCEWithLogitsLoss CrossEntropyLoss L1Loss MSELoss"),
        (onnxblock.optim, "AdamW AdamWOptimizer ClipGradNorm SGD SGDOptimizer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_names_of_onnxruntime_training_are_there(module: Any, names: str) -> None:
    assert [name for name in names.split() if not hasattr(module, name)] == []


# -- the model being built -----------------------------------------------------------------------------------


def test_the_given_model_is_not_changed() -> None:
    model = two_inputs()
    before = model.SerializeToString(deterministic=True)
    with onnxblock.base(model, "where/it/was.onnx") as accessor:
        blocks.Add()("A", "B")
        assert len(accessor.model.graph.node) == 3
    assert model.SerializeToString(deterministic=True) == before


def test_threads_build_models_of_their_own() -> None:
    with onnxblock.base(two_inputs()) as accessor, ThreadPoolExecutor(1) as other:
        nodes = other.submit(lambda: len(built(blocks.Add()).graph.node)).result()
        assert nodes == 3 and len(accessor.model.graph.node) == 2


def test_new_names_are_free() -> None:
    model = two_inputs()
    model.graph.node.append(onnx.helper.make_node("Neg", ["a"], ["onnx::add_output::7"], "loss"))
    model.graph.node.append(onnx.helper.make_node("Neg", ["a"], ["loss"]))
    with onnxblock.base(model) as accessor:
        onnxblock.loss.MSELoss()(blocks.Add()("A", "B"))
        made = [name for node in accessor.model.graph.node for name in node.output]
    assert len(set(made)) == len(made)


def test_two_losses_of_one_kind_fit_in_one_model() -> None:
    model = built(
        lambda a, b: blocks.Add()(
            onnxblock.loss.CrossEntropyLoss()(a, "one"), onnxblock.loss.CrossEntropyLoss()(b, "two")
        )
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    one, two = np.array([0, 2]), np.array([1, 0])
    (loss,) = session.run(None, {"a": X, "b": Y, "one": one, "two": two})
    expected = [F.cross_entropy(torch.tensor(s), torch.tensor(t)) for s, t in ((X, one), (Y, two))]
    np.testing.assert_allclose(loss, sum(expected), rtol=TOLERANCE)
    names = [check.name for check in label_checks({p.key: p.value for p in model.metadata_props})]
    assert names == ["one", "two"]


def test_an_empty_base_has_the_opset_that_is_wanted() -> None:
    with onnxblock.empty_base(17) as accessor:
        imports = {entry.domain: entry.version for entry in accessor.model.opset_import}
    assert imports[""] == 17
    with onnxblock.empty_base() as accessor:
        imports = {entry.domain: entry.version for entry in accessor.model.opset_import}
    assert imports[""] == onnx.defs.onnx_opset_version()


class _Broken(onnxblock.Block):
    def build(self) -> str:
        self.base.graph.node.append(onnx.helper.make_node("NoSuchOperator", ["a"], ["out"]))
        return "out"


class _Training(onnxblock.TrainingBlock):
    def __init__(self) -> None:
        super().__init__()
        self._loss = onnxblock.loss.MSELoss()

    def build(self, y: str, z: str) -> str:
        return self._loss(y)


def test_a_training_block_makes_both_models(tmp_path: Path) -> None:
    block = _Training()
    for name in ("w1", "b1", "w2"):
        block.requires_grad(name)
    block.requires_grad("b1", False)
    forward = custom_losses.forward_model()
    with onnxblock.base(forward) as accessor:
        loss = block("y", "z")
        assert accessor.model == block.to_model_proto()[0]
    training, evaluation = block.to_model_proto()
    assert [value.name for value in training.graph.input] == ["x", "target", "w1", "b1", "w2"]
    assert [value.name for value in training.graph.output] == [loss, "w1_grad", "w2_grad"]
    assert [value.name for value in evaluation.graph.output] == [loss]
    trainable, frozen = block.parameters()
    assert [tensor.name for tensor in trainable] == ["w1", "w2"]
    assert [tensor.name for tensor in frozen] == ["b1"]

    onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
    onnxblock.save_checkpoint(block.parameters(), tmp_path / "nominal", nominal_checkpoint=True)
    saved, nominal = load_checkpoint(tmp_path / "checkpoint"), load_checkpoint(tmp_path / "nominal")
    assert saved.frozen == nominal.frozen == {"b1"} and nominal.nominal and not saved.nominal
    other = custom_losses.forward_model()
    for tensor in other.graph.initializer:
        zeros = np.zeros_like(onnx.numpy_helper.to_array(tensor))
        tensor.CopyFrom(onnx.numpy_helper.from_array(zeros, tensor.name))
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", other)
    for tensor, original in zip(other.graph.initializer, forward.graph.initializer, strict=True):
        value, expected = onnx.numpy_helper.to_array(tensor), onnx.numpy_helper.to_array(original)
        np.testing.assert_array_equal(value, 0 * expected if tensor.name == "w3" else expected)
    with pytest.raises(ValueError, match="'.*nominal' has no values"):
        onnxblock.load_checkpoint_to_model(tmp_path / "nominal", other)
    with pytest.raises(ValueError, match="has no parameter that is an initializer of the model"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", two_inputs())
    other.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros((4, 6), np.float32), "w1"))
    with pytest.raises(ValueError, match=r"'w1' is float32 \[4, 6\] in the model and float32 \[4, 5\]"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", other)


class _TrainingWithOutputs(_Training):
    def build(self, y: str, z: str) -> tuple[str, str, str]:
        return self._loss(y), z, y


def test_a_module_returns_all_that_a_training_block_returns() -> None:
    block = _TrainingWithOutputs()
    forward = custom_losses.forward_model()
    with onnxblock.base(forward):
        block("y", "z")
    training, evaluation = block.to_model_proto()
    trainable, frozen = block.parameters()
    assert not frozen
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in trainable}
    module = Module(training, CheckpointState(Checkpoint(values)), evaluation)
    x = custom_losses.batch()["x"]
    y, z = onnx.reference.ReferenceEvaluator(forward).run(["y", "z"], {"x": x})
    for mode in (module.train(), module.eval()):
        loss, *further = mode(x, np.zeros_like(y))
        np.testing.assert_allclose(loss, np.mean(y**2), rtol=TOLERANCE)
        for got, expected in zip(further, (z, y), strict=True):
            np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _nested() -> None:
    with onnxblock.base(two_inputs()), onnxblock.empty_base():
        pass


def _nested_libraries() -> None:
    with onnxblock.custom_op_library(__file__), onnxblock.custom_op_library(__file__):
        pass


def _call(block: Callable[..., Any], *names: str) -> None:
    with onnxblock.base(two_inputs()):
        block(*names)


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda: blocks.Add()("a", "b"), RuntimeError, "call them within 'with onnxblock.base"),
        (_nested, RuntimeError, "blocks are adding to a model already"),
        (_nested_libraries, RuntimeError, "is in use"),
        (lambda: _enter(onnxblock.base(None)), RuntimeError, "must be an onnx.ModelProto; got NoneType"),  # type: ignore[arg-type]
        (lambda: _enter(onnxblock.custom_op_library("none.so")), RuntimeError, "no library at 'none.so'"),
        (lambda: Forward(blocks.Add()).to_model_proto(), RuntimeError, "there is no model yet"),
        (lambda: _Training().to_model_proto(), RuntimeError, "to_model_proto: there are no models yet"),
        (lambda: _Training().parameters(), RuntimeError, "parameters: there are no models yet"),
        (lambda: _call(_Broken()), onnx.checker.ValidationError, "NoSuchOperator"),
        (lambda: _call(blocks.InputLike("c")), LookupError, "the model has no value 'c'"),
        (lambda: _call(Forward(lambda: "c")), LookupError, "the model has no value 'c'"),
        (
            lambda: onnxblock.optim.AdamW(clip_grad=1.0),
            TypeError,
            "clip_grad must be .*ClipGradNorm.*got float",
        ),  # type: ignore[arg-type]
    ],
)
def test_misuse_is_said(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
    with onnxblock.base(two_inputs()):  # whatever went wrong, the next model can be built
        blocks.Add()("A", "B")


def _enter(manager: Any) -> None:
    with manager:
        pass


# -- optimizers ----------------------------------------------------------------------------------------------

PARAMETERS = {"w": ((3, 2), onnx.TensorProto.FLOAT), "b": ((2,), onnx.TensorProto.FLOAT)}


def optimizer_model(block: Any) -> onnx.ModelProto:
    tensors = [
        onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
        for name, (shape, _) in PARAMETERS.items()
    ]
    with onnxblock.empty_base():
        block((tensors, []))
    return block.to_model_proto()


@pytest.mark.parametrize(
    "block, rule",
    [
        (
            onnxblock.optim.AdamW(),
            AdamW(epsilon=1e-6, weight_decay=0.0, form=AdamWForm.HUGGING_FACE),
        ),
        (
            onnxblock.optim.AdamW(False, (0.8, 0.9), 1e-3, 0.1, onnxblock.optim.ClipGradNorm(2.5)),
            AdamW(
                bias_correction=False,
                betas=(0.8, 0.9),
                epsilon=1e-3,
                weight_decay=0.1,
                max_gradient_norm=2.5,
                form=AdamWForm.HUGGING_FACE,
            ),
        ),
        (onnxblock.optim.SGD(), SGD()),
        (onnxblock.optim.SGD(onnxblock.optim.ClipGradNorm(0.5)), SGD(max_gradient_norm=0.5)),
    ],
)
def test_optimizer_blocks_build_the_rules(block: Any, rule: Any) -> None:
    assert optimizer_model(block) == build_optimizer_model(PARAMETERS, rule)


class _OwnOptimizer(onnxblock.ForwardBlock):
    """Arranges nodes for sequences of tensors itself, as programs for onnxruntime-training may."""

    def __init__(self, optimizer: Any, clip: Any) -> None:
        super().__init__()
        self._optimizer, self._clip = optimizer, clip

    def build(self, parameters: Any) -> str:
        make = onnx.helper.make_tensor_sequence_value_info
        tensor = onnx.helper.make_tensor_value_info
        graph = self.base.graph
        graph.input.append(tensor("learning_rate", onnx.TensorProto.FLOAT, [1]))
        graph.input.append(tensor("step", onnx.TensorProto.INT64, [1]))
        for name in ("params", "gradients", "first", "second"):
            graph.input.append(make(name, onnx.TensorProto.FLOAT, None))
        gradients = self._clip("gradients") if self._clip else "gradients"
        if isinstance(self._optimizer, onnxblock.optim.SGDOptimizer):
            updated = self._optimizer("learning_rate", "params", gradients)
        else:
            updated = self._optimizer("learning_rate", "step", "params", gradients, "first", "second")
        graph.output.append(tensor(updated, onnx.TensorProto.BOOL, [1]))
        return updated


def rounded(number: float) -> float:
    """As an attribute of a node holds it: in float32."""
    return float(np.float32(number))


@pytest.mark.parametrize(
    "optimizer, clip, rule",
    [
        (
            onnxblock.optim.AdamWOptimizer(betas=(0.8, 0.9), weight_decay=0.1),
            onnxblock.optim.ClipGradNorm(2.5),
            AdamW(
                betas=(rounded(0.8), rounded(0.9)),
                epsilon=rounded(1e-6),
                weight_decay=rounded(0.1),
                max_gradient_norm=2.5,
                form=AdamWForm.HUGGING_FACE,
            ),
        ),
        (onnxblock.optim.SGDOptimizer(), None, SGD()),
    ],
)
def test_nodes_for_sequences_become_a_rule(optimizer: Any, clip: Any, rule: Any) -> None:
    block = _OwnOptimizer(optimizer, clip)
    assert rule_of(optimizer_model(block)) == rule
    made = build_artifacts(
        custom_losses.forward_model(), loss=LossType.MSELoss, loss_input_names=["y"], optimizer=block
    )
    trained = {name: (custom_losses.SHAPES[name], onnx.TensorProto.FLOAT) for name in ("w1", "b1", "w2")}
    assert made.optimizer_model == build_optimizer_model(trained, rule)


def test_nodes_beside_an_optimizers_are_refused() -> None:
    model = optimizer_model(_OwnOptimizer(onnxblock.optim.SGDOptimizer(), None))
    model.graph.node.append(onnx.helper.make_node("Neg", ["learning_rate"], ["other"]))
    with pytest.raises(ValueError, match="must have no others but InplaceClipGradNorm; it has .*Neg"):
        rule_of(model)
    assert rule_of(two_inputs()) is None
