"""The command: from files to a trained model that plain ONNX Runtime runs, resumed bit for bit; errors as
sentences.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import small_run
from click.testing import Result
from typer.testing import CliRunner

from ort_ops.cli import app
from ort_ops.training.checkpoint import load_checkpoint
from ort_ops.training.metrics import read_metrics

# Two towers that share their weights; row i of both sides belongs together. Its first output is its loss.
PAIR_MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
pairs (float[N, 5] title, float[N, 5] passage) => (float loss, float[N, N] similarities)
    <int64 first = {0}, int64 one = {1}, int64[1] rows = {0}>
{
    title_hidden = Gemm(title, hidden_weight, hidden_bias)
    title_vector = Tanh(title_hidden)
    passage_hidden = Gemm(passage, hidden_weight, hidden_bias)
    passage_vector = Tanh(passage_hidden)
    passage_columns = Transpose <perm = [1, 0]> (passage_vector)
    projected = MatMul(title_vector, output_weight)
    similarities = MatMul(projected, passage_columns)
    shape = Shape(title)
    count_1d = Gather(shape, rows)
    count = Squeeze(count_1d)
    answers = Range(first, count, one)
    loss = SoftmaxCrossEntropyLoss(similarities, answers)
}
"""


def ort_ops(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train(*arguments: str | Path) -> str:
    result = ort_ops("train", "--threads", "1", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with forward models and data."""
    folder = tmp_path_factory.mktemp("cli")
    onnx.save(small_run.forward_model(), folder / "forward.onnx")
    np.savez(folder / "data.npz", **small_run.samples(300))
    np.savez(folder / "held_out.npz", **small_run.samples(100, seed=2))
    pairs = onnx.parser.parse_model(PAIR_MODEL)
    generator = np.random.default_rng(0)
    for name, shape in {"hidden_weight": (5, 8), "hidden_bias": (8,), "output_weight": (8, 8)}.items():
        values = generator.normal(size=shape).astype(np.float32) / 2
        pairs.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(pairs, folder / "pairs.onnx")
    title = generator.normal(size=(96, 5)).astype(np.float32)
    np.savez(folder / "pairs.npz", title=title, passage=-title)
    return folder


RUN = ("--batch-size", "16", "--learning-rate", "0.02", "--seed", "3")


@pytest.fixture(scope="module")
def run(files: Path) -> Path:
    """The folder of a run of six epochs."""
    out = files / "run"
    printed = train(files / "forward.onnx", files / "data.npz", "--out", out, "--epochs", "6", *RUN)
    lines = printed.splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("epoch   1   step     17   training loss ")
    assert lines[-1] == f"{out} has model.onnx, losses.png, metrics.csv, checkpoint.safetensors"
    return out


def test_the_trained_model_runs_in_plain_onnxruntime(files: Path, run: Path) -> None:
    with np.load(files / "held_out.npz") as held_out:
        x, labels = held_out["x"], held_out["labels"]
    session = ort.InferenceSession(run / "model.onnx")
    assert [value.name for value in session.get_inputs()] == ["x"]
    (logits,) = session.run(["logits"], {"x": x})
    assert np.mean(logits.argmax(axis=1) == labels) > 0.85
    untrained = ort.InferenceSession(files / "forward.onnx").run(["logits"], {"x": x})[0]
    assert np.mean(untrained.argmax(axis=1) == labels) < 0.5


def test_metrics_and_curves(run: Path) -> None:
    records = read_metrics(run / "metrics.csv", epochs=6)
    assert [record.step for record in records] == list(range(1, 6 * 17 + 1))  # 270 samples in 17 batches
    assert [r.epoch for r in records if r.validation_loss is not None] == [1, 2, 3, 4, 5, 6]
    assert (run / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_resumed_run_ends_with_the_same_bytes(
    files: Path, run: Path, tmp_path: Path, schedule: str
) -> None:
    """With a falling rate the interrupted run must have been told of all epochs: it is cut off by force."""
    settings = (files / "forward.onnx", files / "data.npz", *RUN, "--schedule", schedule)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    if schedule == "constant":
        whole = run
        train(*settings, "--out", parts, "--epochs", "2")
    else:
        train(*settings, "--out", whole, "--epochs", "6")
        script = (
            "import os, ort_ops.training.run as run, ort_ops.cli as cli\n"
            "append = run.MetricsFile.append\n"
            "def die(file, metrics):\n"
            "    append(file, metrics)\n"
            "    if metrics.step == 40: os.kill(os.getpid(), 9)\n"
            "run.MetricsFile.append = die\n"
            "cli.app()\n"
        )
        arguments = ["train", "--threads", "1", *settings, "--out", parts, "--epochs", "6"]
        killed = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True)
        assert killed.returncode == -9
        assert len((parts / "metrics.csv").read_text().splitlines()) == 41
    assert load_checkpoint(parts / "checkpoint.safetensors").step == 34
    printed = train(*settings, "--out", parts, "--epochs", "6", "--resume")
    assert printed.startswith("epoch   3   step     51")
    for name in ("checkpoint.safetensors", "model.onnx"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name
    losses = [
        [(r.step, r.training_loss, r.validation_loss) for r in read_metrics(out / "metrics.csv", epochs=6)]
        for out in (whole, parts)
    ]
    assert losses[0] == losses[1]


def test_a_contrastive_model_with_its_own_loss_and_frozen_parameters(files: Path, tmp_path: Path) -> None:
    train(
        *(files / "pairs.onnx", files / "pairs.npz", "--out", tmp_path, "--loss", "own"),
        *("--freeze", "hidden*", "--learning-rate", "0.05", "--batch-size", "16", "--clip", "1"),
    )
    first = load_checkpoint(tmp_path / "artifacts" / "checkpoint")
    last = load_checkpoint(tmp_path / "checkpoint.safetensors")
    changed = {n for n, value in last.parameters.items() if not np.array_equal(value, first.parameters[n])}
    assert changed == {"output_weight"}
    records = read_metrics(tmp_path / "metrics.csv", epochs=10)
    assert records[0].training_loss > np.log(16) > 2 > records[-1].training_loss
    session = ort.InferenceSession(tmp_path / "model.onnx")
    assert [value.name for value in session.get_outputs()] == ["similarities"]


def test_artifacts_are_trained_with_other_data_to_validate_on_and_another_output(
    files: Path, tmp_path: Path
) -> None:
    options = ("--optimizer", "sgd", "--momentum", "0.9", "--train", "output*")
    result = ort_ops("artifacts", files / "forward.onnx", tmp_path / "artifacts", *options)
    assert result.exit_code == 0, result.output
    names = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        str(tmp_path / "artifacts" / name) for name in names
    ]
    train(
        *(tmp_path / "artifacts", files / "data.npz", "--out", tmp_path / "run", "--epochs", "2"),
        *("--validation", files / "held_out.npz", "--schedule", "linear", "--warmup", "3"),
        *("--learning-rate", "0.04", "--export", "active"),
    )
    records = read_metrics(tmp_path / "run" / "metrics.csv", epochs=2)
    assert len(records) == 20  # nothing of the 300 samples was split off
    np.testing.assert_allclose([r.learning_rate for r in records[:4]], [0.04 / 3, 0.08 / 3, 0.04, 0.04])
    assert records[-1].validation_loss is not None
    session = ort.InferenceSession(tmp_path / "run" / "model.onnx")
    assert [value.name for value in session.get_outputs()] == ["active"]


def test_without_validation(files: Path, tmp_path: Path) -> None:
    train(
        *(files / "forward.onnx", files / "data.npz", "--out", tmp_path, "--epochs", "1"),
        *("--validation", "0", "--compute-type", "bfloat16"),
    )
    records = read_metrics(tmp_path / "metrics.csv", epochs=1)
    assert len(records) == 10
    assert all(record.validation_loss is None for record in records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.onnx", "data.npz"], "There is no model file at 'nowhere.onnx'"),
        (["forward.onnx", "nowhere.npz"], "There is no data at 'nowhere.npz'."),
        (["forward.onnx", "data.npz", "--loss", "mse"], "it lacks 'target' and has x, labels."),
        (["forward.onnx", "data.npz", "--freeze", "hiden*"], "'hiden*', which matches no tensor"),
        (["forward.onnx", "data.npz", "--momentum", "0.9"], "Only the optimizer sgd has a momentum"),
        (["forward.onnx", "data.npz", "--validation", "1.5"], "must be between 0 and 1; got 1.5."),
        (["forward.onnx", "data.npz", "--validation", "nowhere.npz"], "There is no data at 'nowhere.npz'."),
        (["forward.onnx", "data.npz", "--export", "logit"], "no value 'logit' to export; is 'logits' meant?"),
        (["forward.onnx", "data.npz", "--device", "tpu"], "device must be 'cpu', 'cuda'"),
        (["forward.onnx", "data.npz", "--resume"], "There is no run to resume in 'new'"),
        (["forward.onnx", "data.npz", "--learning-rate", "1e30"], "training has diverged."),
        (["forward.onnx", "pairs.npz"], "it lacks 'x', 'labels' and has title, passage."),
        (
            ["fixed.onnx", "data.npz"],
            "batches of 8 samples and no others, which makes a batch size of 8; got 32.",
        ),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    for file in files.glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    fixed = small_run.forward_model(small_run.FORWARD_MODEL.replace("[N", "[8"))
    onnx.save(fixed, tmp_path / "fixed.onnx")
    monkeypatch.chdir(tmp_path)
    result = ort_ops("train", *arguments, "--out", "new", "--epochs", "1", "--threads", "1")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert "epoch   1" not in result.output  # it was found before a whole epoch was trained


def test_a_run_is_neither_overwritten_nor_resumed_with_other_settings(files: Path, run: Path) -> None:
    again = ort_ops("train", files / "forward.onnx", files / "data.npz", "--out", run)
    assert again.exit_code == 1
    assert f"There is a run in '{run}' already." in again.stderr
    other = ("--batch-size", "16", "--learning-rate", "0.03", "--seed", "3", "--freeze", "hidden_bias")
    resumed = ort_ops("train", files / "forward.onnx", files / "data.npz", "--out", run, "--resume", *other)
    assert resumed.exit_code == 1
    assert (
        "this one had learning_rate 0.02, freeze [], and now learning_rate is 0.03, freeze is"
        in resumed.stderr
    )


def test_options_of_a_forward_model_are_refused_for_artifacts(files: Path, run: Path, tmp_path: Path) -> None:
    result = ort_ops("train", run / "artifacts", files / "data.npz", "--out", tmp_path, "--loss", "mse")
    assert result.exit_code == 1
    assert "is a folder of artifacts, for which loss has been decided" in result.stderr


def test_help_teaches_by_an_example_and_comes_at_once() -> None:
    script = (
        "import sys\nfrom ort_ops.cli import app\n"
        "try: app(prog_name='ort-ops')\n"
        "finally: print({'onnx', 'onnxruntime', 'numpy', 'torch', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "ort-ops train classifier.onnx data.npz --out run --epochs 5" in done.stdout
    assert done.stdout.endswith("set()\n")
