"""The demo's whole loop on a tiny configuration: it learns, repeats itself bit for bit, resumes, leaves its
files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import char_gpt
import numpy as np
import onnxruntime as ort
import pytest
from rich.console import Console

from ort_ops.training import load_checkpoint

TEXT = "the cat sat on the mat; the dog sat on the log.\n" * 60
TINY = char_gpt.Settings(
    steps=150,
    batch=8,
    context=16,
    width=16,
    heads=2,
    layers=2,
    peak_learning_rate=1e-2,
    warmup_steps=5,
    evaluate_every=50,
)


def train(
    settings: char_gpt.Settings, path: Path, threads: int = 2, resume: bool = False
) -> char_gpt.Training:
    training = char_gpt.Training(settings, TEXT, threads, resume_from=path if resume else None)
    char_gpt.train_with_progress(training, path, Console(quiet=True))
    return training


def entropy_given_one_character(text: str) -> float:
    """Entropy of a character given the one before, in nats."""
    pairs = Counter(zip(text, text[1:], strict=False))
    firsts = Counter(text[:-1])
    return -sum(n / (len(text) - 1) * math.log(n / firsts[pair[0]]) for pair, n in pairs.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[char_gpt.Training, Path]:
    path = tmp_path_factory.mktemp("trained") / "checkpoint.safetensors"
    return train(TINY, path), path


def test_learns(trained: tuple[char_gpt.Training, Path]) -> None:
    history = trained[0].history
    assert len(history.training) == TINY.steps
    assert history.training[0] == pytest.approx(np.log(len(set(TEXT))), rel=0.05)
    assert [step for step, _ in history.validation] == [50, 100, 150]
    # Better than any model that knows only the character before: it has learnt to use its context.
    assert history.validation[-1][1] < 0.7 * entropy_given_one_character(TEXT)


def test_a_second_run_gives_the_same_bytes(trained: tuple[char_gpt.Training, Path], tmp_path: Path) -> None:
    again = train(TINY, tmp_path / "again")
    assert again.history == trained[0].history
    assert (tmp_path / "again").read_bytes() == trained[1].read_bytes()
    other = train(dataclasses.replace(TINY, seed=1), tmp_path / "other")
    assert other.history != again.history


def test_resuming_gives_the_same_bytes(trained: tuple[char_gpt.Training, Path], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    interrupted = char_gpt.Training(TINY, TEXT, threads=2)
    for _ in range(67):
        interrupted.advance()
    interrupted.save(path)
    resumed = train(TINY, path, resume=True)
    assert resumed.history == trained[0].history
    assert path.read_bytes() == trained[1].read_bytes()


def test_resuming_with_other_settings_is_refused(trained: tuple[char_gpt.Training, Path]) -> None:
    with pytest.raises(ValueError, match=r"saved with steps 150, but now steps is 151\."):
        train(dataclasses.replace(TINY, steps=151), trained[1], resume=True)


def test_checkpoint_holds_the_parameters_and_the_state(trained: tuple[char_gpt.Training, Path]) -> None:
    checkpoint = load_checkpoint(trained[1])
    assert checkpoint.step == TINY.steps
    assert set(checkpoint.optimizer_state) == {"step"} | {
        f"{name}_{moment}_moment" for name in checkpoint.parameters for moment in ("first", "second")
    }
    for name, value in trained[0].parameters().items():
        np.testing.assert_array_equal(checkpoint.parameters[name], value)


def test_sample_continues_the_text(trained: tuple[char_gpt.Training, Path]) -> None:
    model = trained[0].text_model()
    sample = char_gpt.sample_text(model, "the ", length=40, temperature=0.1, seed=0)
    assert len(sample) == 44
    assert sample.startswith("the ")
    assert "sat on the" in sample
    assert sample == char_gpt.sample_text(model, "the ", length=40, temperature=0.1, seed=0)


def test_validation_covers_the_held_out_tenth_once_and_training_never_touches_it() -> None:
    text = "".join(chr(ord("A") + n // 26) + chr(ord("a") + n % 26) for n in range(200))
    data = char_gpt.CharacterData(text, context=8)
    held_out = text[360:]
    windows = [
        (t, g) for b in data.validation_batches(2) for t, g in zip(b["tokens"], b["targets"], strict=True)
    ]
    read = "".join(data.alphabet[token] for tokens, _ in windows for token in tokens)
    predicted = "".join(data.alphabet[token] for _, targets in windows for token in targets)
    assert read == held_out[: len(read)]
    assert predicted == held_out[1 : len(read) + 1]
    assert len(held_out) - len(predicted) - 1 < 8
    seen: set[str] = set()
    for step in range(300):
        batch = data.training_batch(seed=0, step=step, size=4)
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
            window = "".join(data.alphabet[token] for token in [*tokens, targets[-1]])
            assert window in text[:360]
            np.testing.assert_array_equal(tokens[1:], targets[:-1])
            seen.add(window)
    # All 352 places, or nearly: the first and the last must be among them.
    assert text[:9] in seen
    assert text[351:360] in seen


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than the context of 64 characters; the text has 100"):
        char_gpt.CharacterData("ab" * 50, context=64)


def test_the_command_leaves_its_files(tmp_path: Path) -> None:
    """Two steps of the real configuration on the real text, in a process of its own as a user runs it."""
    script = Path(char_gpt.__file__)
    command = [sys.executable, str(script), "--steps", "2", "--output", str(tmp_path / "run")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path != str(script.parent)),
    }
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    files = {path.name: path for path in (tmp_path / "run").iterdir()}
    assert set(files) == {"checkpoint.safetensors", "char_gpt.onnx", "loss.png", "sample.txt"}
    assert hashlib.sha256(files["checkpoint.safetensors"].read_bytes()).hexdigest() in result.stdout
    assert files["loss.png"].read_bytes().startswith(b"\x89PNG")
    assert len(files["sample.txt"].read_text(encoding="utf-8")) == char_gpt.SAMPLE_LENGTH + len(
        char_gpt.SAMPLE_PROMPT
    )
    session = ort.InferenceSession(files["char_gpt.onnx"], providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"text": np.array(["The with state"])})
    assert np.isfinite(logits).all()

    refused = subprocess.run(
        [*command, "--resume", "--seed", "1"], capture_output=True, text=True, env=environment
    )
    assert refused.returncode == 2
    assert "seed 0" in refused.stderr
