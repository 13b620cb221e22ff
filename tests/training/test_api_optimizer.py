"""Optimizer: updates equal to plain runs of its model, in place, resumed bit for bit; learning rates."""

from __future__ import annotations

import gc
from pathlib import Path

import least_squares as ls
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from least_squares import assert_same_bits

import ort_ops
from ort_ops.training.api import (
    CheckpointState,
    ConstantLRScheduler,
    CosineLRScheduler,
    LinearLRScheduler,
    LRScheduler,
    Module,
    Optimizer,
)
from ort_ops.training.checkpoint import Checkpoint
from ort_ops.training.optimizer import AdamW, LossScaling, build_optimizer_model, initial_state
from ort_ops.training.schedule import constant_with_warmup, cosine_with_warmup

TRAINED = ("w", "b")

# Its parameters cannot be updated in place: `w_copy` is read after `w_updated` has been made.
NOT_IN_PLACE = """
<ir_version: 9, opset_import: ["" : 18]>
descent (float learning_rate, int64 step, float[3, 2] w, float[3, 2] w_grad, float[2] b, float[2] b_grad)
    => (float[3, 2] w_updated, float[2] b_updated, int64 step_updated, float distance)
    <int64 one = {1}>
{
    step_updated = Add(step, one)
    w_step = Mul(w_grad, learning_rate)
    b_step = Mul(b_grad, learning_rate)
    w_updated = Sub(w, w_step)
    b_updated = Sub(b, b_step)
    w_moved = Sub(w_updated, w)
    distance = ReduceL2 <keepdims = 0> (w_moved)
}
"""


def optimizer_state(module: Module) -> ls.Tensors:
    return {name: tensor.read() for name, tensor in module.state.training_state.optimizer_state.items()}


def test_steps_are_runs_of_the_optimizer_model() -> None:
    """Nine steps, so that what is written in place is read again, against plain runs with NumPy arrays."""
    model = ls.optimizer_model()
    options = ort.SessionOptions()
    ort_ops.register(options)
    gradient_session = ort.InferenceSession(ls.training_model().SerializeToString(), options)
    optimizer_session = ort.InferenceSession(model.SerializeToString(), options)
    names = [output.name for output in optimizer_session.get_outputs()]
    state = initial_state(model)
    values = ls.first_parameters()
    module, optimizer = ls.new_training()
    optimizer.set_learning_rate(0.1)
    for step in range(9):
        module(ls.batch(step))
        report = optimizer.step()
        module.lazy_reset_grad()
        gc.collect()

        gradients = gradient_session.run(["w_grad", "b_grad"], {**ls.batch(step), **values})
        feeds = {"learning_rate": np.array(0.1, np.float32), "w_grad": gradients[0], "b_grad": gradients[1]}
        feeds |= {**state, **{name: values[name] for name in TRAINED}}
        outputs = dict(zip(names, optimizer_session.run(names, feeds), strict=True))
        updated = {name.removesuffix("_updated"): value for name, value in outputs.items()}
        values |= {name: updated[name] for name in TRAINED}
        state = {name: updated[name] for name in state}
        assert_same_bits(report, {"gradient_norm": outputs["gradient_norm"]})
        assert_same_bits(ls.parameters(module), values)
        assert_same_bits(optimizer_state(module), state)
        assert optimizer.step_count == step + 1


def test_learns_and_leaves_the_callers_arrays_alone() -> None:
    first = ls.first_parameters()
    module, optimizer = ls.new_training(CheckpointState(Checkpoint(first, frozen=frozenset({"a_offset"}))))
    optimizer.set_learning_rate(0.05)
    losses = [ls.train_step(module, optimizer, step) for step in range(200)]
    assert np.mean(losses[-10:]) < 0.05 * np.mean(losses[:10])
    assert_same_bits(first, ls.first_parameters())


def test_everything_is_updated_in_its_own_memory() -> None:
    module, optimizer = ls.new_training()
    state = module.state.training_state
    tensors = {**state.parameters, **state.gradients, **state.optimizer_state}
    addresses = {name: tensor.value.data_ptr() for name, tensor in tensors.items()}
    assert len(set(addresses.values())) == len(addresses)
    for step in range(3):
        ls.train_step(module, optimizer, step)
    now = {**state.parameters, **state.gradients, **state.optimizer_state}
    assert {name: tensor.value.data_ptr() for name, tensor in now.items()} == addresses
    assert optimizer._copied == []


def test_what_cannot_be_updated_in_place_is_right_all_the_same() -> None:
    module = ls.new_module()
    optimizer = Optimizer(onnx.parser.parse_model(NOT_IN_PLACE), module)
    assert optimizer._copied == ["w"]
    optimizer.set_learning_rate(0.5)
    for step in range(3):
        before = ls.parameters(module)
        module.lazy_reset_grad()
        module(ls.batch(step))
        gradients = {name: module.state.parameters[name].grad for name in TRAINED}
        report = optimizer.step()
        for name in TRAINED:
            expected = before[name] - gradients[name] * np.float32(0.5)
            np.testing.assert_array_equal(module.state.parameters[name].data, expected)
        assert report["distance"] == pytest.approx(0.5 * np.linalg.norm(gradients["w"]), rel=1e-5)
    assert optimizer.step_count == 3


@pytest.mark.parametrize("cut", [1, 4])
def test_resuming_gives_the_same_bits(cut: int, tmp_path: Path) -> None:
    whole = ls.new_training()
    interrupted = ls.new_training()
    for _, optimizer in (whole, interrupted):
        optimizer.set_learning_rate(0.1)
    for step in range(7):
        ls.train_step(*whole, step)
    for step in range(cut):
        ls.train_step(*interrupted, step)
    CheckpointState.save_checkpoint(interrupted[0].state, tmp_path / "saved", include_optimizer_state=True)
    resumed = ls.new_training(CheckpointState.load_checkpoint(tmp_path / "saved"))
    assert resumed[1].get_learning_rate() == 0.1
    assert resumed[1].step_count == cut
    for step in range(cut, 7):
        ls.train_step(*resumed, step)
    assert_same_bits(ls.parameters(resumed[0]), ls.parameters(whole[0]))
    assert_same_bits(optimizer_state(resumed[0]), optimizer_state(whole[0]))


def test_without_optimizer_state_it_starts_anew(tmp_path: Path) -> None:
    module, optimizer = ls.new_training()
    optimizer.set_learning_rate(0.1)
    ls.train_step(module, optimizer, 0)
    CheckpointState.save_checkpoint(module.state, tmp_path / "saved")
    again, optimizer = ls.new_training(CheckpointState.load_checkpoint(tmp_path / "saved"))
    assert_same_bits(ls.parameters(again), ls.parameters(module))
    assert optimizer.get_learning_rate() == 1e-3
    assert_same_bits(optimizer_state(again), initial_state(ls.optimizer_model()))


def test_a_skipped_step_changes_nothing_and_the_scale_reaches_the_training_model() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18]>
        scaled (float x, float[2] p, float loss_scale) => (float loss, float[2] p_grad)
        {
            total = ReduceSum <keepdims = 0> (p)
            loss = Mul(total, x)
            seed = Mul(x, loss_scale)
            shape = Shape(p)
            p_grad = Expand(seed, shape)
        }
    """)
    module = Module(model, CheckpointState(Checkpoint({"p": np.ones(2, np.float32)})))
    assert module.input_names() == ["x"]
    x = np.array(3, np.float32)
    module(x)
    np.testing.assert_array_equal(module.state.parameters["p"].grad, [3, 3])  # unscaled without an optimizer
    optimizer = Optimizer(
        build_optimizer_model(
            {"p": ((2,), onnx.TensorProto.FLOAT)}, AdamW(), loss_scaling=LossScaling(initial_scale=1024.0)
        ),
        module,
    )
    module.lazy_reset_grad()
    module(x)
    np.testing.assert_array_equal(module.state.parameters["p"].grad, [3072, 3072])
    assert not optimizer.step()["skipped"]
    assert optimizer.step_count == 1
    before = ls.parameters(module)
    module.lazy_reset_grad()
    module(np.array(np.inf, np.float32))
    assert optimizer.step()["skipped"]
    assert optimizer.step_count == 1
    assert_same_bits(ls.parameters(module), before)
    module.lazy_reset_grad()
    module(x)
    np.testing.assert_array_equal(module.state.parameters["p"].grad, [1536, 1536])


def test_refuses_models_and_states_that_do_not_fit(tmp_path: Path) -> None:
    module = ls.new_module()
    wrong = onnx.parser.parse_model(NOT_IN_PLACE.replace("learning_rate", "learning_rat"))
    with pytest.raises(ValueError, match="must be 'learning_rate', .*; learning_rat is not"):
        Optimizer(wrong, module)
    kinds = {"other": ((2,), onnx.TensorProto.FLOAT)}
    with pytest.raises(ValueError, match="updates 'other', which is not a trained .* those are w, b"):
        Optimizer(build_optimizer_model(kinds, AdamW()), module)
    kinds = {"b": ((3,), onnx.TensorProto.FLOAT)}
    with pytest.raises(ValueError, match=r"'b' is float32 \[3\] in the optimizer model and float32 \[2\] in"):
        Optimizer(build_optimizer_model(kinds, AdamW()), module)
    with pytest.raises(FileNotFoundError, match="There is no model file at"):
        Optimizer(tmp_path / "nowhere.onnx", module)

    checkpoint = Checkpoint(
        ls.first_parameters(), {"w_momentum": np.zeros(2)}, frozen=frozenset({"a_offset"})
    )
    with pytest.raises(ValueError, match="missing: b_first_moment, .*; unknown: w_momentum. Use"):
        ls.new_training(CheckpointState(checkpoint))


def test_learning_rates_are_numbers_that_make_sense() -> None:
    _, optimizer = ls.new_training()
    assert optimizer.get_learning_rate() == 1e-3
    optimizer.set_learning_rate(0.25)
    assert optimizer.get_learning_rate() == 0.25
    for rate in (-0.1, np.nan, np.inf):
        with pytest.raises(ValueError, match="must be finite and not negative; got"):
            optimizer.set_learning_rate(rate)
    assert optimizer.get_learning_rate() == 0.25


# -- schedulers ----------------------------------------------------------------------------------------------


def rates(module: Module, optimizer: Optimizer, scheduler: LRScheduler, count: int) -> list[float]:
    """The rate of each of the next updates."""
    found = []
    for step in range(count):
        found.append(optimizer.get_learning_rate())
        ls.train_step(module, optimizer, step)
        scheduler.step()
    return found


def test_linear_rates_are_those_of_onnxruntime_training_with_its_arguments_in_the_right_order() -> None:
    module, optimizer = ls.new_training()
    scheduler = LinearLRScheduler(optimizer, 2, 6, 1.0)
    assert rates(module, optimizer, scheduler, 8) == [0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]


def test_cosine_and_constant_rates_are_those_of_the_schedules() -> None:
    module, optimizer = ls.new_training()
    cosine = CosineLRScheduler(optimizer, 2, 6, 0.5, final_lr=0.1)
    assert rates(module, optimizer, cosine, 8) == [
        cosine_with_warmup(step, peak=0.5, total_steps=6, warmup_steps=2, final=0.1) for step in range(8)
    ]
    module, optimizer = ls.new_training()
    constant = ConstantLRScheduler(optimizer, 3, 0.5)
    assert rates(module, optimizer, constant, 5) == [
        constant_with_warmup(step, peak=0.5, warmup_steps=3) for step in range(5)
    ]


def test_a_scheduler_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    module, optimizer = ls.new_training()
    scheduler = LinearLRScheduler(optimizer, 2, 6, 1.0)
    rates(module, optimizer, scheduler, 3)
    CheckpointState.save_checkpoint(module.state, tmp_path / "saved", include_optimizer_state=True)
    module, optimizer = ls.new_training(CheckpointState.load_checkpoint(tmp_path / "saved"))
    assert optimizer.get_learning_rate() == 0.75
    scheduler = LinearLRScheduler(optimizer, 2, 6, 1.0)
    assert rates(module, optimizer, scheduler, 4) == [0.75, 0.5, 0.25, 0]


def test_schedulers_refuse_counts_that_contradict_each_other() -> None:
    _, optimizer = ls.new_training()
    for kind in (LinearLRScheduler, CosineLRScheduler):
        with pytest.raises(ValueError, match=r"between 0 and total_step_count \(2\); got 6"):
            kind(optimizer, 6, 2, 1.0)


def test_a_scheduler_needs_an_optimizer_that_counts() -> None:
    model = NOT_IN_PLACE.replace("int64 step,", "").replace(", int64 step_updated", "")
    model = model.replace("    step_updated = Add(step, one)\n", "")
    optimizer = Optimizer(onnx.parser.parse_model(model), ls.new_module())
    with pytest.raises(ValueError, match="does not count its steps: it has no state 'step'"):
        LinearLRScheduler(optimizer, 2, 6, 1.0)
