"""Module: steps equal to plain runs of its models, accumulation, all kinds of batches, one buffer, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import least_squares as ls
import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from least_squares import assert_same_bits

import ort_ops
from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.api.session import Session
from ort_ops.training.checkpoint import Checkpoint
from ort_ops.training.losses import LABELS_KEY, LabelCheck, note_label_check


def plain_run(step: int, parameters: ls.Tensors) -> ls.Tensors:
    session = ort.InferenceSession(ls.training_model().SerializeToString())
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {**ls.batch(step), **parameters}), strict=True))


def gradients(module: Module) -> ls.Tensors:
    found = {name: parameter.grad for name, parameter in module.state.parameters}
    return {f"{name}_grad": value for name, value in found.items() if value is not None}


def test_a_training_step_is_a_run_of_the_training_model() -> None:
    module = ls.new_module()
    expected = plain_run(0, ls.first_parameters())
    loss = module(ls.batch(0))
    np.testing.assert_array_equal(loss, expected["loss"], strict=True)
    assert_same_bits(gradients(module), {name: expected[name] for name in ("w_grad", "b_grad")})
    assert_same_bits(ls.parameters(module), ls.first_parameters())


def test_steps_add_to_the_gradients_until_they_are_reset() -> None:
    """The sums that float32 additions of plain runs give, in this order."""
    module = ls.new_module()
    runs = [plain_run(step, ls.first_parameters()) for step in range(4)]

    def sums(steps: list[int]) -> ls.Tensors:
        total = {name: runs[steps[0]][name].copy() for name in ("w_grad", "b_grad")}
        for step in steps[1:]:
            for name in total:
                total[name] += runs[step][name]
        return total

    for step in (0, 1, 2):
        module(ls.batch(step))
        assert_same_bits(gradients(module), sums(list(range(step + 1))))
    module.lazy_reset_grad()
    module.eval()
    module(ls.batch(3))
    module.train()
    assert_same_bits(gradients(module), sums([0, 1, 2]))  # until the next training step
    module(ls.batch(3))
    assert_same_bits(gradients(module), sums([3]))
    module(ls.batch(3))
    assert_same_bits(gradients(module), {name: 2 * value for name, value in sums([3]).items()})


def test_a_failed_step_resets_nothing() -> None:
    module = ls.new_module()
    module(ls.batch(0))
    before = gradients(module)
    module.lazy_reset_grad()
    with pytest.raises(ValueError, match="Input 'y' must be"):
        module(ls.batch(0)["x"], np.zeros((4, 3), np.float32))
    assert_same_bits(gradients(module), before)
    module(ls.batch(0))
    assert_same_bits(gradients(module), before)


def test_gradients_are_zeros_first_and_none_for_frozen_parameters() -> None:
    state = ls.new_state()
    assert state.parameters["w"].grad is None
    ls.new_module(state)
    np.testing.assert_array_equal(state.parameters["w"].grad, np.zeros((3, 2), np.float32), strict=True)
    assert state.parameters["a_offset"].grad is None


def test_evaluation_sees_the_parameters_of_the_moment_and_changes_nothing() -> None:
    module, optimizer = ls.new_training()
    session = ort.InferenceSession(ls.eval_model().SerializeToString())
    for step in range(3):
        now = ls.parameters(module)
        expected = session.run(["loss"], {**ls.batch(step), **now})[0]
        before = gradients(module)
        assert module.eval() is module
        assert not module.training
        np.testing.assert_array_equal(module(ls.batch(step)), expected, strict=True)
        assert_same_bits(ls.parameters(module), now)
        assert_same_bits(gradients(module), before)
        assert module.train() is module
        assert module.training
        ls.train_step(module, optimizer, step)


def test_evaluation_without_a_model_is_refused() -> None:
    module = Module(ls.training_model(), ls.new_state())
    with pytest.raises(RuntimeError, match="it has no evaluation model. Give its path as eval_model_uri"):
        module.eval()
    assert module.training
    module.training = False
    with pytest.raises(RuntimeError, match="it has no evaluation model"):
        module(ls.batch(0))
    with pytest.raises(RuntimeError, match="cannot export: it has no evaluation model"):
        module.export_model_for_inferencing("never.onnx", ["prediction"])


def test_results_survive_the_next_step() -> None:
    module = Module(ls.training_model(), ls.new_state(), additional_output_names=["prediction"])
    first = module(ls.batch(0))
    kept = [value.copy() for value in first]
    module(ls.batch(1))
    for got, expected in zip(first, kept, strict=True):
        np.testing.assert_array_equal(got, expected)


# -- batches and results -------------------------------------------------------------------------------------


def torch_batch() -> ls.Tensors:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return {name: torch.from_numpy(value) for name, value in ls.batch(0).items()}


def ort_batch() -> dict[str, ort.OrtValue]:
    return {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in ls.batch(0).items()}


def test_a_batch_is_given_by_position_name_or_keyword() -> None:
    module = ls.new_module().eval()
    data = ls.batch(0)
    assert module.input_names() == ["x", "y"]
    expected = module(data)
    for got in (
        module(data["x"], data["y"]),
        module(x=data["x"], y=data["y"]),
        module(data["x"], y=data["y"]),
        module({"y": data["y"], "x": data["x"]}),
        module({"x": data["x"]}, y=data["y"]),
    ):
        np.testing.assert_array_equal(got, expected)


def test_the_results_are_of_the_kind_of_the_batch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    module = Module(
        ls.training_model(), ls.new_state(), ls.eval_model(), additional_output_names=["prediction"]
    )
    expected = module(ls.batch(0))
    assert [type(value) for value in expected] == [np.ndarray, np.ndarray]
    for data, kind in ((torch_batch(), torch.Tensor), (ort_batch(), ort.OrtValue)):
        got = module(data)
        assert [type(value) for value in got] == [kind, kind]
        for value, reference in zip(got, expected, strict=True):
            as_array = value.numpy()
            np.testing.assert_array_equal(as_array, reference, strict=True)
    mixed = module(ort_batch()["x"], ls.batch(0)["y"])
    assert [type(value) for value in mixed] == [np.ndarray, np.ndarray]


def test_batches_are_read_right_however_they_lie_in_memory() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    module = ls.new_module()
    data = ls.batch(0)
    expected = module(data)
    column_major = {name: np.asfortranarray(value) for name, value in data.items()}
    np.testing.assert_array_equal(module(column_major), expected)
    swapped = {name: value.astype(value.dtype.newbyteorder("S")) for name, value in data.items()}
    np.testing.assert_array_equal(module(swapped), expected)
    strided = {name: torch.from_numpy(np.repeat(value, 2, axis=1))[:, ::2] for name, value in data.items()}
    np.testing.assert_array_equal(module(strided).numpy(), expected)


def test_bfloat16_goes_in_and_out_in_every_kind_of_batch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        sixteen (bfloat16[N] x, bfloat16[1] p)
            => (bfloat16 loss, bfloat16[N] shifted, bfloat16[1] p_grad)
            <float[1] one = {1}>
        {
            shifted = Add(x, p)
            loss = ReduceSum <keepdims = 0> (shifted)
            p_grad = Cast <to = 16> (one)
        }
    """)
    p = np.array([0.5], ml_dtypes.bfloat16)
    module = Module(model, CheckpointState(Checkpoint({"p": p})), additional_output_names=["shifted"])
    # 256.5 is between two bfloat16 numbers; 256 is the even one.
    loss, shifted = module(np.array([1, 256, -3], ml_dtypes.bfloat16))
    assert loss.dtype == shifted.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(shifted.astype(np.float32), [1.5, 256, -2.5])
    loss, shifted = module(torch.tensor([1, 256, -3], dtype=torch.bfloat16))
    assert loss.dtype == shifted.dtype == torch.bfloat16
    assert shifted.tolist() == [1.5, 256, -2.5]
    gradient = module.state.parameters["p"].grad  # of two steps, one each
    assert gradient is not None
    np.testing.assert_array_equal(gradient, np.array([2], ml_dtypes.bfloat16), strict=True)


def test_additional_outputs_come_after_the_loss() -> None:
    model, evaluation = ls.training_model(), ls.eval_model()
    for each in (model, evaluation):
        entry = each.metadata_props.add()
        entry.key, entry.value = "ort_ops.additional_outputs", '["prediction"]'
    module = Module(model, ls.new_state(), evaluation)
    assert module.output_names() == ["loss", "prediction"]
    expected = plain_run(0, ls.first_parameters())
    for mode in (module.train(), module.eval()):
        loss, prediction = mode(ls.batch(0))
        np.testing.assert_array_equal(loss, expected["loss"])
        np.testing.assert_array_equal(prediction, expected["prediction"])
    assert Module(model, ls.new_state(), additional_output_names=[]).output_names() == ["loss"]
    with pytest.raises(
        ValueError, match=r"outputs of the training model; logits is none of loss, prediction\."
    ):
        Module(model, ls.new_state(), additional_output_names=["logits"])
    with pytest.raises(ValueError, match="w_grad is none of loss, prediction"):
        Module(model, ls.new_state(), additional_output_names=["w_grad"])


def wrong_batches() -> list[tuple[Any, str]]:
    x, y = ls.batch(0).values()
    return [
        (((x,), {}), "exactly the inputs x, y; missing: y."),
        (((x, y, y), {}), r"The model has 2 inputs \(x, y\); got 3."),
        ((({"x": x, "z": y},), {}), "exactly the inputs x, y; missing: y; unknown: z."),
        (((x, y), {"x": x}), "given twice: x."),
        (((x.astype(np.float64), y), {}), r"Input 'x' must be float32 \[N, 3\]; got float64 \[4, 3\]."),
        (((x[:, :2], y), {}), r"Input 'x' must be float32 \[N, 3\]; got float32 \[4, 2\]."),
        (((x[0], y), {}), r"Input 'x' must be float32 \[N, 3\]; got float32 \[3\]."),
    ]


@pytest.mark.parametrize(("given", "message"), wrong_batches())
def test_refuses_batches_that_do_not_fit(given: Any, message: str) -> None:
    module = ls.new_module()
    inputs, named = given
    with pytest.raises(ValueError, match=message):
        module(*inputs, **named)
    assert module.eval()(ls.batch(0)) > 0


def test_refuses_what_is_no_tensor() -> None:
    x, y = ls.batch(0).values()
    with pytest.raises(TypeError, match="Input 'x' must be a NumPy array, an OrtValue or .* got list"):
        ls.new_module()(x.tolist(), y)


def test_refuses_labels_that_are_no_classes() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        classify (float[N, 3] scores, int64[N] labels, float[3] bias) => (float loss, float[3] bias_grad)
        {
            shifted = Add(scores, bias)
            loss = SoftmaxCrossEntropyLoss <ignore_index = -1> (shifted, labels)
            bias_grad = Identity(bias)
        }
    """)
    entry = model.metadata_props.add()
    entry.key, entry.value = LABELS_KEY, note_label_check({}, LabelCheck("labels", 3, -1))
    module = Module(model, CheckpointState(Checkpoint({"bias": np.zeros(3, np.float32)})))
    scores = np.zeros((4, 3), np.float32)
    assert module(scores, np.array([0, 2, -1, 1])) == pytest.approx(np.log(3))
    for wrong in (3, -2):
        labels = np.array([0, 2, wrong, 1])
        with pytest.raises(
            ValueError, match=rf"'labels' must hold class indices from 0 to 2.* got {wrong} at"
        ):
            module(scores, labels)
        with pytest.raises(ValueError, match=f"got {wrong} at"):
            module(scores, ort.OrtValue.ortvalue_from_numpy(labels))


# -- all parameters as one buffer ----------------------------------------------------------------------------


def test_the_flat_buffer_has_the_order_of_the_models_inputs() -> None:
    module = ls.new_module()
    values = ls.first_parameters()
    everything = np.concatenate([values["w"].reshape(-1), values["b"], values["a_offset"]])
    assert module.get_parameters_size() == 8
    assert module.get_parameters_size(trainable_only=False) == 9
    assert module.get_contiguous_parameters().data_type() == "tensor(float)"
    np.testing.assert_array_equal(module.get_contiguous_parameters().numpy(), everything, strict=True)
    np.testing.assert_array_equal(
        module.get_contiguous_parameters(trainable_only=True).numpy(), everything[:-1], strict=True
    )


def test_the_flat_buffer_sets_the_parameters() -> None:
    module = ls.new_module()
    new = np.arange(9, dtype=np.float32)
    module.copy_buffer_to_parameters(ort.OrtValue.ortvalue_from_numpy(new), trainable_only=False)
    expected = {"w": new[:6].reshape(3, 2).copy(), "b": new[6:8].copy(), "a_offset": new[8:].copy()}
    assert_same_bits(ls.parameters(module), expected)
    module.copy_buffer_to_parameters(-new[:8])
    assert_same_bits(ls.parameters(module), {**expected, "w": -expected["w"], "b": -expected["b"]})
    new[:] = 7
    assert_same_bits(ls.parameters(module), {**expected, "w": -expected["w"], "b": -expected["b"]})
    with pytest.raises(ValueError, match=r"must be float32 \[8\], .* got float32 \[9\]"):
        module.copy_buffer_to_parameters(new)
    with pytest.raises(ValueError, match=r"must be float32 \[9\], .* got float64 \[9\]"):
        module.copy_buffer_to_parameters(new.astype(np.float64), trainable_only=False)


# -- sessions and devices ------------------------------------------------------------------------------------


def test_models_may_be_paths_bytes_or_messages(tmp_path: Path) -> None:
    onnx.save(ls.training_model(), tmp_path / "training_model.onnx")
    onnx.save(ls.eval_model(), tmp_path / "eval_model.onnx")
    expected = ls.new_module()(ls.batch(0))
    for form in (str, Path):
        paths = [form(tmp_path / name) for name in ("training_model.onnx", "eval_model.onnx")]
        module = Module(paths[0], ls.new_state(), paths[1])
        np.testing.assert_array_equal(module(ls.batch(0)), expected)
        np.testing.assert_array_equal(module.eval()(ls.batch(0)), expected)
    module = Module(ls.training_model().SerializeToString(), ls.new_state())
    np.testing.assert_array_equal(module(ls.batch(0)), expected)
    with pytest.raises(FileNotFoundError, match="There is no model file at '.*nowhere.onnx'"):
        Module(tmp_path / "nowhere.onnx", ls.new_state())


def test_session_options_are_used_with_the_plugin_registered_once_or_before() -> None:
    options = ort.SessionOptions()
    ort_ops.register(options)
    options.intra_op_num_threads = 1
    module = Module(ls.training_model(), ls.new_state(), ls.eval_model(), session_options=options)
    Optimizer(ls.optimizer_model(), module)
    assert module.session_options is options
    np.testing.assert_array_equal(module(ls.batch(0)), ls.new_module()(ls.batch(0)))


@pytest.mark.parametrize("device", ["gpu", "cpu:1", "cuda:", "cuda:x", ""])
def test_refuses_devices_that_do_not_exist(device: str) -> None:
    with pytest.raises(ValueError, match=f"device must be 'cpu', 'cuda' or .* got '{device}'"):
        Module(ls.training_model(), ls.new_state(), device=device)


def test_cuda_without_its_provider_is_an_error_that_says_what_to_do() -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(RuntimeError, match="CUDAExecutionProvider .* lacks; it has .* Install ort-ops"):
        Module(ls.training_model(), ls.new_state(), device="cuda:0")


def test_refuses_a_state_of_another_model() -> None:
    values = ls.first_parameters()

    def module(parameters: ls.Tensors, frozen: str = "a_offset") -> Module:
        return Module(
            ls.training_model(), CheckpointState(Checkpoint(parameters, frozen=frozenset([frozen])))
        )

    with pytest.raises(ValueError, match="do not belong together. Parameters not in the model: c"):
        module({**values, "c": values["b"]})
    with pytest.raises(ValueError, match="not in the checkpoint: b"):
        module({"w": values["w"], "a_offset": values["a_offset"]})
    with pytest.raises(ValueError, match="frozen in the checkpoint, but with a gradient in the model: b"):
        module(values, frozen="b")
    with pytest.raises(ValueError, match=r"'b' is float32 \[2\] in the training model and float32 \[3\] in"):
        module({**values, "b": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"'b' is float32 \[2\] in the training model and float64 \[2\] in"):
        module({**values, "b": np.zeros(2)})


def test_refuses_models_that_would_not_evaluate_what_is_trained() -> None:
    def module(evaluation: onnx.ModelProto) -> Module:
        return Module(ls.training_model(), ls.new_module().state, evaluation)

    with pytest.raises(ValueError, match=r"no evaluation model of this training: .* gradients \(w, b\)"):
        module(ls.training_model())
    forward = ls.eval_model()
    del forward.graph.input[3]
    forward.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(2, np.float32), "b"))
    with pytest.raises(ValueError, match="no evaluation model of this training: the parameters b are no in"):
        module(forward)


def test_refuses_arguments_of_another_kind() -> None:
    with pytest.raises(TypeError, match="state must be a CheckpointState, .* got str"):
        Module(ls.training_model(), "checkpoint")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module must be a Module; got CheckpointState"):
        Optimizer(ls.optimizer_model(), ls.new_module().state)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="buffer must be an OrtValue or a NumPy array; got list"):
        ls.new_module().copy_buffer_to_parameters([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a list of names; got 'prediction'"):
        ls.new_module().export_model_for_inferencing("unwritten.onnx", "prediction")


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads train at once without a reset: no two runs overlap, and the gradients are summed up."""
    run, running, most = Session.run, [0], [0]

    def watched(session: Session, *arguments: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.001)  # lets the other threads in
        results = run(session, *arguments)
        running[0] -= 1
        return results

    monkeypatch.setattr(Session, "run", watched)
    module = ls.new_module()
    data = ls.batch(0)
    module(data)
    single = gradients(module)
    losses: list[float] = []

    def work() -> None:
        for _ in range(8):
            losses.append(float(module(data)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(losses) == 64
    assert len(set(losses)) == 1
    for name, value in gradients(module).items():
        # 64 additions of one number, each rounded once
        np.testing.assert_allclose(value, 65 * single[name], rtol=64 * 2.0**-24)


def test_importing_the_training_needs_neither_pytorch_nor_mpi() -> None:
    script = (
        "import sys, ort_ops.training; "
        "print([name for name in ('torch', 'mpi4py', 'matplotlib', 'transformers') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout == "[]\n"
