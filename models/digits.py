"""Train a classifier of handwritten digits: forward model, artifacts, training, evaluation, export.

Written against the interface of `onnxruntime.training` alone: with `ort_ops.training` changed to
`onnxruntime.training` in its two imports the same script runs on onnxruntime-training 1.19.2, and the losses
are the same. The model is a small ONNX text, so that nothing here needs PyTorch.

    python models/digits.py                      the digits that come with scikit-learn
    python models/digits.py --data digits.npz    arrays `images` [N, 64], 0 to 16, and `digits` [N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from ort_ops.training import artifacts, onnxblock
from ort_ops.training.api import CheckpointState, Module, Optimizer

FORWARD_MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
digits (float[N, 64] pixels) => (float[N, 10] logits)
{
    hidden = Gemm <transB = 1> (pixels, hidden_weight, hidden_bias)
    active = Relu(hidden)
    logits = Gemm <transB = 1> (active, output_weight, output_bias)
}
"""
PARAMETERS = ["hidden_weight", "hidden_bias", "output_weight", "output_bias"]
HIDDEN_UNITS = 100

EPOCHS = 10
BATCH_SIZE = 32
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.01


def build_forward_model(seed: int) -> onnx.ModelProto:
    """Pixels in, logits out, with random weights: normal, of variance 2 / inputs (He et al. 2015)."""
    generator = np.random.default_rng(seed)

    def weight(outputs: int, inputs: int) -> np.ndarray:
        return generator.normal(0.0, np.sqrt(2 / inputs), (outputs, inputs))

    values = {
        "hidden_weight": weight(HIDDEN_UNITS, 64),
        "hidden_bias": np.zeros(HIDDEN_UNITS),
        "output_weight": weight(10, HIDDEN_UNITS),
        "output_bias": np.zeros(10),
    }
    model = onnx.parser.parse_model(FORWARD_MODEL)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(values[name].astype(np.float32), name) for name in PARAMETERS
    )
    return model


def load_data(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Pixels from 0 to 1, float32 [N, 64], and the digits they show, int64 [N]."""
    if path is None:
        from sklearn.datasets import load_digits

        images, digits = load_digits(return_X_y=True)
    else:
        with np.load(path) as arrays:
            images, digits = arrays["images"], arrays["digits"]
    return (images / 16).astype(np.float32), digits.astype(np.int64)


def batches(
    pixels: np.ndarray, digits: np.ndarray, generator: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every sample once, in random order; the last batch may be smaller."""
    order = generator.permutation(len(pixels))
    for first in range(0, len(order), BATCH_SIZE):
        chosen = order[first : first + BATCH_SIZE]
        yield pixels[chosen], digits[chosen]


def train_epoch(
    module: Module,
    optimizer: Optimizer,
    pixels: np.ndarray,
    digits: np.ndarray,
    generator: np.random.Generator,
) -> list[float]:
    """The loss of every step."""
    module.train()
    losses = []
    for batch_pixels, batch_digits in batches(pixels, digits, generator):
        losses.append(float(module(batch_pixels, batch_digits)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def evaluation_loss(module: Module, pixels: np.ndarray, digits: np.ndarray) -> float:
    module.eval()
    return float(module(pixels, digits))


def accuracy(model_path: Path, pixels: np.ndarray, digits: np.ndarray) -> float:
    """Of the exported model, which any ONNX Runtime runs."""
    session = onnxruntime.InferenceSession(str(model_path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"pixels": pixels})
    return float(np.mean(logits.argmax(axis=1) == digits))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--data", type=Path, help=".npz with `images` and `digits` [scikit-learn's own]")
    parser.add_argument("--output", type=Path, default=Path("digits"), help="folder for everything [digits]")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.output
    folder.mkdir(parents=True, exist_ok=True)

    pixels, digits = load_data(arguments.data)
    generator = np.random.default_rng(arguments.seed)
    order = generator.permutation(len(pixels))
    held_out, training = np.split(order, [len(order) // 5])

    artifacts.generate_artifacts(
        build_forward_model(arguments.seed),
        requires_grad=PARAMETERS,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=onnxblock.optim.AdamW(weight_decay=WEIGHT_DECAY),
        artifact_directory=str(folder),
    )
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(LEARNING_RATE)

    losses = []
    for epoch in range(1, EPOCHS + 1):
        losses += train_epoch(module, optimizer, pixels[training], digits[training], generator)
        loss = evaluation_loss(module, pixels[held_out], digits[held_out])
        print(f"epoch {epoch:2d}   training loss {losses[-1]:.4f}   held-out loss {loss:.4f}")
        CheckpointState.save_checkpoint(state, str(folder / "checkpoint"), include_optimizer_state=True)
    np.savetxt(folder / "losses.csv", losses, header="loss", comments="")

    module.export_model_for_inferencing(str(folder / "digits.onnx"), ["logits"])
    share = accuracy(folder / "digits.onnx", pixels[held_out], digits[held_out])
    print(f"accuracy on the {len(held_out)} held-out digits: {share:.4f}")


if __name__ == "__main__":
    main()
