"""A whole training run in a folder: artifacts, training with checkpoints and metrics, curves, the exported
model.

This is what the command `ort-ops train` does. The folder gets

    artifacts/              of a forward model, see `generate_artifacts`
    checkpoint.safetensors  after every epoch; a run is resumed from it
    metrics.csv             a line a step
    losses.png              the curves
    model.onnx              for inference in any ONNX Runtime
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort

from ort_ops.training.api import CheckpointState, Module, Optimizer
from ort_ops.training.artifacts import LossType, generate_artifacts
from ort_ops.training.data import (
    Arrays,
    fixed_batch_size,
    load_arrays,
    sample_count,
    select_inputs,
    split_off,
    training_batches,
)
from ort_ops.training.distributed import DataParallel, threads_per_rank
from ort_ops.training.fit import EPOCHS_DONE, fit
from ort_ops.training.metrics import MetricsFile, StepMetrics, plot_losses, read_metrics
from ort_ops.training.optimizer import SGD, Adam, AdamW, Lion, UpdateRule
from ort_ops.training.schedule import constant_with_warmup, cosine_with_warmup, linear_with_warmup

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.csv"
CURVES = "losses.png"
MODEL = "model.onnx"
RESULTS = (MODEL, CURVES, METRICS, CHECKPOINT)

LOSSES: Mapping[str, LossType | None] = {
    "cross-entropy": LossType.CrossEntropyLoss,
    "mse": LossType.MSELoss,
    "l1": LossType.L1Loss,
    "huber": LossType.HuberLoss,
    "bce": LossType.BCEWithLogitsLoss,
    "own": None,
}
OPTIMIZERS: Mapping[str, type[UpdateRule]] = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "lion": Lion}

_SETTINGS = "train.settings"


@dataclass(frozen=True, kw_only=True)
class ArtifactSettings:
    """How a forward model becomes a training; None where the optimizer's own default is meant.

    loss: a key of LOSSES; "own" when the model's first output is the loss.
    optimizer: a key of OPTIMIZERS.
    train, freeze: names or patterns of parameters; see `requires_grad` and `frozen_params` of
        `generate_artifacts`.
    no_decay: names or patterns of parameters without weight decay.
    clip: largest L2 norm of all gradients together.
    """

    loss: str = "cross-entropy"
    optimizer: str = "adamw"
    train: Sequence[str] = ()
    freeze: Sequence[str] = ()
    weight_decay: float | None = None
    no_decay: Sequence[str] = ()
    momentum: float | None = None
    clip: float | None = None
    compute_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A run: what it is made from, and everything that decides its result but the machine.

    source: the forward model's file, or a folder of artifacts.
    data: see `load_arrays`.
    validation: the share of the data to validate on, 0 for none, or another file of data.
    schedule: constant, linear or cosine, after `warmup` steps in which the rate rises.
    exported: the outputs of the exported model, any values of the evaluation model; those of the forward
        model but for the loss when empty.
    """

    source: Path
    data: Path
    output: Path
    artifacts: ArtifactSettings = field(default_factory=ArtifactSettings)
    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 1e-3
    schedule: str = "constant"
    warmup: int = 0
    validation: float | Path = 0.1
    seed: int = 0
    threads: int | None = None
    device: str = "cpu"
    exported: Sequence[str] = ()

    def rate(self, total_steps: int) -> Callable[[int], float]:
        """The learning rate as a function of the step."""
        if self.schedule == "constant":
            return partial(constant_with_warmup, peak=self.learning_rate, warmup_steps=self.warmup)
        falling = {"linear": linear_with_warmup, "cosine": cosine_with_warmup}[self.schedule]
        return partial(falling, peak=self.learning_rate, total_steps=total_steps, warmup_steps=self.warmup)


def write_artifacts(forward_model: Path, folder: Path, settings: ArtifactSettings) -> None:
    """`generate_artifacts` with these settings. Raises ValueError for what does not fit,
    FileNotFoundError."""
    chosen = {
        "weight_decay": settings.weight_decay,
        "momentum": settings.momentum,
        "max_gradient_norm": settings.clip,
    }
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if settings.momentum is not None and settings.optimizer != "sgd":
        raise ValueError(f"Only the optimizer sgd has a momentum to choose; got {settings.optimizer}.")
    rule = OPTIMIZERS[settings.optimizer](no_decay=settings.no_decay, **given)
    generate_artifacts(
        forward_model,
        requires_grad=settings.train or None,
        frozen_params=settings.freeze,
        loss=LOSSES[settings.loss],
        optimizer=rule,
        artifact_directory=folder,
        compute_type=settings.compute_type,
    )


class TrainingRun:
    """One run, ready to train, from the beginning or (with `resume`) from the last checkpoint in its folder.

    communicator: of the ranks that train together; only rank 0 writes files.

    Raises ValueError or FileNotFoundError, in a sentence, when model, data and settings do not fit
    together, when the folder holds a run already, and when there is none to resume or it had other
    settings.
    """

    def __init__(
        self, settings: TrainSettings, *, resume: bool = False, communicator: Comm | None = None
    ) -> None:
        self.settings = settings
        self._communicator = communicator
        self._writes = communicator is None or communicator.rank == 0
        self._checkpoint = settings.output / CHECKPOINT
        self._check_folder(resume)
        # What is needed at the end only is looked for before hours have been spent.
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError("The curves are drawn with matplotlib; run: pip install 'ort-ops[train]'")
        arrays = load_arrays(settings.data)
        self._artifacts = self._make_artifacts(resume)
        state = CheckpointState.load_checkpoint(
            self._checkpoint if resume else self._artifacts / "checkpoint"
        )
        self._check_settings(state, resume)
        self._open(state)
        self._exported_names = self._choose_outputs()
        self._choose_samples(arrays)
        self.steps_per_epoch = len(self._batches())
        self.history: list[StepMetrics] = []
        if resume:
            self.history = read_metrics(settings.output / METRICS, self.epochs_done)

    @property
    def epochs_done(self) -> int:
        properties = self._module.state.properties
        return int(properties[EPOCHS_DONE]) if EPOCHS_DONE in properties else 0

    def train(self, on_step: Callable[[StepMetrics], None] = lambda metrics: None) -> None:
        """Train to the last epoch; `on_step` is called after each step, `history` holds them all."""
        settings = self.settings
        parallel = None
        if self._communicator is not None:
            parallel = DataParallel(self._module, self._communicator)
        file = None
        if self._writes:
            settings.output.mkdir(parents=True, exist_ok=True)
            file = MetricsFile(settings.output / METRICS, self.history)

        def note(metrics: StepMetrics) -> None:
            self.history.append(metrics)
            if file is not None:
                file.append(metrics)
            on_step(metrics)

        fit(
            self._module,
            self._optimizer,
            self._samples,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.rate(settings.epochs * self.steps_per_epoch),
            seed=settings.seed,
            validation=self._validation,
            drop_rest=self._fixed_batch,
            checkpoint_path=self._checkpoint,
            on_step=note,
            parallel=parallel,
        )

    def write_results(self) -> None:
        """Draw the curves and export the trained model."""
        if self._writes:
            plot_losses(self.history, self.settings.output / CURVES)
            self._module.export_model_for_inferencing(self.settings.output / MODEL, self._exported_names)

    def _check_folder(self, resume: bool) -> None:
        if resume and not self._checkpoint.is_file():
            raise FileNotFoundError(
                f"There is no run to resume in '{self.settings.output}': it has no {CHECKPOINT}."
            )
        if not resume and self._checkpoint.exists():
            raise ValueError(
                f"There is a run in '{self.settings.output}' already. Resume it, or choose another folder."
            )

    def _make_artifacts(self, resume: bool) -> Path:
        """The folder of the artifacts, made by rank 0 unless they are there."""
        source = self.settings.source
        if source.is_dir():
            _check_no_artifact_settings(self.settings)
            return source
        folder = self.settings.output / "artifacts"
        if self._writes and not resume:
            write_artifacts(source, folder, self.settings.artifacts)
        if self._communicator is not None:
            self._communicator.Barrier()
        return folder

    def _open(self, state: CheckpointState) -> None:
        options = ort.SessionOptions()
        if self.settings.threads is not None:
            options.intra_op_num_threads = self.settings.threads
        elif self._communicator is not None:
            options.intra_op_num_threads = threads_per_rank(self._communicator)
        folder = self._artifacts
        self._module = Module(
            folder / "training_model.onnx",
            state,
            folder / "eval_model.onnx",
            device=self.settings.device,
            session_options=options,
        )
        self._optimizer = Optimizer(folder / "optimizer_model.onnx", self._module)

    def _choose_samples(self, arrays: Mapping[str, np.ndarray]) -> None:
        settings = self.settings
        model = onnx.load(self._artifacts / "training_model.onnx", load_external_data=False)
        inputs = {value.name: value for value in model.graph.input}
        wanted = [inputs[name] for name in self._module.input_names()]
        size = fixed_batch_size(wanted)
        ranks = 1 if self._communicator is None else self._communicator.size
        if size is not None and size * ranks != settings.batch_size:
            raise ValueError(
                f"The model takes batches of {size} samples and no others, which makes a batch size of "
                f"{size * ranks}; got {settings.batch_size}. Use that, or export the model with a dynamic "
                "first axis."
            )
        self._fixed_batch = size is not None
        samples = select_inputs(arrays, wanted)
        self._samples: Arrays = samples
        self._validation: Arrays | None = None
        if isinstance(settings.validation, Path):
            self._validation = select_inputs(load_arrays(settings.validation), wanted)
        elif settings.validation:
            self._samples, self._validation = split_off(samples, settings.validation, settings.seed)

    def _batches(self) -> list[np.ndarray]:
        settings = self.settings
        return training_batches(
            sample_count(self._samples), settings.batch_size, settings.seed, 1, self._fixed_batch
        )

    def _choose_outputs(self) -> list[str]:
        """The outputs of the model to export."""
        graph = onnx.load(self._artifacts / "eval_model.onnx", load_external_data=False).graph
        values = [name for node in graph.node for name in node.output if name]
        for name in self.settings.exported:
            if name not in values:
                near = difflib.get_close_matches(name, values, n=1)
                hint = (
                    f"is '{near[0]}' meant?"
                    if near
                    else f"its outputs are {', '.join(_names(graph.output))}."
                )
                raise ValueError(f"The evaluation model has no value '{name}' to export; {hint}")
        loss, *others = _names(graph.output)
        return list(self.settings.exported) or others or [loss]

    def _check_settings(self, state: CheckpointState, resume: bool) -> None:
        """What decides the result of a run is kept with it, so that it is resumed with nothing else."""
        now = self._identity()
        if not resume:
            state.properties[_SETTINGS] = json.dumps(now)
            return
        before = json.loads(str(state.properties[_SETTINGS]))
        differing = [name for name in now if now[name] != before.get(name)]
        if differing:
            raise ValueError(
                "A run is resumed with the settings that it was started with; this one had "
                f"{', '.join(f'{name} {before.get(name)}' for name in differing)}, and now "
                f"{', '.join(f'{name} is {now[name]}' for name in differing)}."
            )

    def _identity(self) -> dict[str, object]:
        settings = asdict(self.settings)
        artifacts = settings.pop("artifacts")
        if settings["schedule"] == "constant":
            settings.pop("epochs")  # more of them go on as the first did
        for name in ("source", "data", "output", "threads", "device", "exported"):
            settings.pop(name)
        # As JSON gives it back: lists for tuples, strings for paths.
        return json.loads(json.dumps({**settings, **artifacts}, default=os.fspath))


def _names(values: Iterable[onnx.ValueInfoProto]) -> list[str]:
    return [value.name for value in values]


def _check_no_artifact_settings(settings: TrainSettings) -> None:
    chosen, default = asdict(settings.artifacts), asdict(ArtifactSettings())
    differing = [name.replace("_", "-") for name in chosen if chosen[name] != default[name]]
    if differing:
        raise ValueError(
            f"'{settings.source}' is a folder of artifacts, for which {', '.join(differing)} has been "
            "decided; leave that out, or give a forward model."
        )
