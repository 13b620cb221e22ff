"""The commands `ort-ops artifacts` and `ort-ops train`: options in, one call of `ort_ops.training.run`,
progress and errors out.

Everything but typer is imported inside the commands, so that help comes at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from ort_ops.training.metrics import StepMetrics
    from ort_ops.training.run import ArtifactSettings, TrainingRun, TrainSettings


class Loss(str, Enum):
    CROSS_ENTROPY = "cross-entropy"
    MSE = "mse"
    L1 = "l1"
    HUBER = "huber"
    BCE = "bce"
    OWN = "own"


class Optimizer(str, Enum):
    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"


class ComputeType(str, Enum):
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Schedule(str, Enum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


def _artifact_option(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="From forward model to artifacts", **settings)


LossOption = Annotated[
    Loss,
    _artifact_option(
        help="cross-entropy: an array `labels` holds class indices. mse, l1, huber, bce (binary cross "
        "entropy of logits): an array `target` holds what the output should be. own: the model's first "
        "output is the loss."
    ),
]
OptimizerOption = Annotated[Optimizer, _artifact_option(help="What updates the parameters.")]
TrainOption = Annotated[
    list[str] | None,
    _artifact_option(
        "--train",
        metavar="PATTERN",
        show_default="all",
        help="Train only parameters whose name matches, e.g. '*.bias'. May be repeated.",
    ),
]
FreezeOption = Annotated[
    list[str] | None,
    _artifact_option(
        "--freeze",
        metavar="PATTERN",
        show_default="none",
        help="Leave parameters whose name matches as they are. May be repeated.",
    ),
]
WeightDecayOption = Annotated[
    float | None, _artifact_option(min=0.0, show_default="the optimizer's own", help="Decay of parameters.")
]
NoDecayOption = Annotated[
    list[str] | None,
    _artifact_option(
        "--no-decay",
        metavar="PATTERN",
        show_default="none",
        help="Parameters without weight decay, e.g. '*.bias'. May be repeated.",
    ),
]
MomentumOption = Annotated[float | None, _artifact_option(min=0.0, show_default="0", help="Momentum of sgd.")]
ClipOption = Annotated[
    float | None,
    _artifact_option(
        show_default="any", help="Largest L2 norm of all gradients together; larger are scaled."
    ),
]
ComputeTypeOption = Annotated[
    ComputeType | None,
    _artifact_option(
        show_default="the model's", help="Type of matrix products; parameters stay as they are."
    ),
]


def artifacts(
    forward: Annotated[Path, typer.Argument(metavar="FORWARD.onnx", help="The forward model.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the artifacts go.")],
    loss: LossOption = Loss.CROSS_ENTROPY,
    optimizer: OptimizerOption = Optimizer.ADAMW,
    train: TrainOption = None,
    freeze: FreezeOption = None,
    weight_decay: WeightDecayOption = None,
    no_decay: NoDecayOption = None,
    momentum: MomentumOption = None,
    clip: ClipOption = None,
    compute_type: ComputeTypeOption = None,
) -> None:
    """Write what a training needs: training, evaluation and optimizer model, and a checkpoint.

    Train them with `ort-ops train FOLDER ...`, or in Python with `ort_ops.training.api`.
    """
    with _errors_as_sentences():
        from ort_ops.training.run import write_artifacts

        write_artifacts(
            forward,
            folder,
            _artifact_settings(
                loss, optimizer, train, freeze, weight_decay, no_decay, momentum, clip, compute_type
            ),
        )
    for file in sorted(folder.iterdir()):
        typer.echo(f"{file}  {file.stat().st_size:,} bytes")


def train(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A forward model (.onnx), or a folder of artifacts.")
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="An .npz or .safetensors file, or a folder of .npy files: an array for each input of the "
            "model and of the loss, by its name, with the samples along the first axis.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where everything goes.")],
    epochs: Annotated[int, typer.Option(min=1, help="How often each sample is used.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="The highest one.")] = 1e-3,
    schedule: Annotated[
        Schedule, typer.Option(help="Whether and how the learning rate falls to 0.")
    ] = Schedule.CONSTANT,
    warmup: Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises first.")] = 0,
    validation: Annotated[
        str,
        typer.Option(
            metavar="SHARE|DATA", help="Share of the data to validate on after each epoch, or other data."
        ),
    ] = "0.1",
    seed: Annotated[int, typer.Option(min=0, help="Of the samples' order and of dropout.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, show_default="one a core", help="Threads of ONNX Runtime.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="the model's outputs",
            help="A value that the exported model computes. May be repeated.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on behind the last epoch of the run in the folder.")
    ] = False,
    loss: LossOption = Loss.CROSS_ENTROPY,
    optimizer: OptimizerOption = Optimizer.ADAMW,
    train_patterns: TrainOption = None,
    freeze: FreezeOption = None,
    weight_decay: WeightDecayOption = None,
    no_decay: NoDecayOption = None,
    momentum: MomentumOption = None,
    clip: ClipOption = None,
    compute_type: ComputeTypeOption = None,
) -> None:
    """Train a model on data; leave checkpoint, metrics, curves and a model for inference.

    A run that is resumed ends with the same bits as one that was not interrupted. Processes that mpirun
    starts share every batch.

        ort-ops train classifier.onnx data.npz --out run --epochs 5
        ort-ops train encoder.onnx pairs.npz --out run --loss own --freeze 'embeddings.*'
        mpirun -n 4 ort-ops train classifier.onnx data.npz --out run
    """

    def main(communicator: Comm | None) -> None:
        with _errors_as_sentences(communicator):
            from ort_ops.training.run import RESULTS, TrainingRun, TrainSettings

            artifact_settings = _artifact_settings(
                loss, optimizer, train_patterns, freeze, weight_decay, no_decay, momentum, clip, compute_type
            )
            settings = TrainSettings(
                source=source,
                data=data,
                output=out,
                artifacts=artifact_settings,
                epochs=epochs,
                batch_size=batch_size,
                learning_rate=learning_rate,
                schedule=schedule.value,
                warmup=warmup,
                validation=_share_or_path(validation),
                seed=seed,
                threads=threads,
                device=device,
                exported=tuple(export or ()),
            )
            run = TrainingRun(settings, resume=resume, communicator=communicator)
            with _progress(run, settings, shown=communicator is None or communicator.rank == 0) as on_step:
                run.train(on_step)
            run.write_results()
            if communicator is None or communicator.rank == 0:
                typer.echo(f"{out} has {', '.join(RESULTS)}")

    with _errors_as_sentences():
        from ort_ops.training import distributed

        if distributed.started_by_mpi():
            distributed.run(main)
        else:
            main(None)


def _artifact_settings(
    loss: Loss,
    optimizer: Optimizer,
    train: list[str] | None,
    freeze: list[str] | None,
    weight_decay: float | None,
    no_decay: list[str] | None,
    momentum: float | None,
    clip: float | None,
    compute_type: ComputeType | None,
) -> ArtifactSettings:
    from ort_ops.training.run import ArtifactSettings

    return ArtifactSettings(
        loss=loss.value,
        optimizer=optimizer.value,
        train=tuple(train or ()),
        freeze=tuple(freeze or ()),
        weight_decay=weight_decay,
        no_decay=tuple(no_decay or ()),
        momentum=momentum,
        clip=clip,
        compute_type=None if compute_type is None else compute_type.value,
    )


def _share_or_path(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
        return Path(text)


@contextmanager
def _errors_as_sentences(communicator: Comm | None = None) -> Iterator[None]:
    """What the caller can mend is told without a traceback. RuntimeError is ONNX Runtime's."""
    try:
        yield
    except (ValueError, OSError, ArithmeticError, RuntimeError, ImportError) as error:
        if communicator is not None:
            from ort_ops.training.distributed import let_rank_0_speak

            let_rank_0_speak(communicator)
        typer.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from error


@contextmanager
def _progress(
    run: TrainingRun, settings: TrainSettings, shown: bool
) -> Iterator[Callable[[StepMetrics], None]]:
    """A bar that follows the steps, and a line for every epoch."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(highlight=False, quiet=not shown)
    columns = (
        *(TextColumn("training"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[speed]:,.0f} samples/s")),
        *(TextColumn("time left"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        total, done = settings.epochs * run.steps_per_epoch, len(run.history)
        task = progress.add_task("", total=total, completed=done, loss="-", speed=0.0)
        start = time.perf_counter()

        def on_step(metrics: StepMetrics) -> None:
            seconds = time.perf_counter() - start
            speed = (metrics.step - done) * settings.batch_size / seconds
            loss = f"{metrics.training_loss:.4g}"
            progress.update(task, completed=metrics.step, loss=loss, speed=speed)
            if metrics.step % run.steps_per_epoch == 0:
                validation = metrics.validation_loss
                console.print(
                    f"epoch {metrics.epoch:3d}   step {metrics.step:6d}   training loss "
                    f"{metrics.training_loss:.4f}"
                    + ("" if validation is None else f"   validation loss {validation:.4f}")
                )

        yield on_step
