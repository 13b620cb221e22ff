"""The command `ort-ops`."""

from __future__ import annotations

from typing import Annotated

import typer

from ort_ops import cli_training

app = typer.Typer(
    name="ort-ops",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def main() -> None:
    """Train transformers with the stock ONNX Runtime.

    For example a classifier of images: export it to classifier.onnx with an input `images` and an output of
    one score per class, and save its data in Python, samples along the first axis:

        numpy.savez("data.npz", images=images, labels=labels)

    Then this trains it:

        ort-ops train classifier.onnx data.npz --out run --epochs 5

    The folder `run` has the trained model for any ONNX Runtime (model.onnx), the curves (losses.png), the
    numbers (metrics.csv) and a checkpoint, from which the same command with --resume goes on.
    """


app.command()(cli_training.artifacts)
app.command()(cli_training.train)


@app.command()
def info() -> None:
    """Show what was found, what was built, and what can run here."""
    from ort_ops.library import describe

    facts = describe()
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")


bench = typer.Typer(invoke_without_command=True)
app.add_typer(bench, name="bench")

Threads = Annotated[int, typer.Option(min=1, help="Threads of every candidate.")]
Rounds = Annotated[int, typer.Option(min=3, help="How often the candidates take turns.")]


@bench.callback()
def bench_operator(context: typer.Context, threads: Threads = 2, rounds: Rounds = 15) -> None:
    """Time AddLayerNormGrad beside PyTorch (eager and compiled) and the machine's streaming floor.

    Prints a Markdown table of medians and ratios. Takes about five minutes and needs PyTorch:
    pip install 'ort-ops[cpu,bench]'. `ort-ops bench step` times whole training steps instead.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        from rich.console import Console
        from rich.progress import track

        from ort_ops import bench as benchmark

        summary = benchmark.versions()
    except ImportError as error:
        typer.echo(f"{error}; the benchmark needs: pip install 'ort-ops[cpu,bench]'", err=True)
        raise typer.Exit(1) from error
    console = Console(stderr=True)
    cases = [(*shape, dtype) for dtype in benchmark.ELEMENT_TYPES for shape in benchmark.SHAPES]
    rows = []
    for rows_count, cols, dtype in track(cases, description="measuring", console=console):
        rows.append(benchmark.measure(rows_count, cols, dtype, threads, rounds))
    typer.echo(f"{summary}, {threads} threads, medians of {rounds} rounds\n")
    typer.echo(benchmark.markdown(rows))


@bench.command("step")
def bench_step(
    threads: Threads = 2,
    rounds: Rounds = 15,
    peer_python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter of an environment with onnxruntime-training and PyTorch, to compare with."
        ),
    ] = None,
) -> None:
    """Time training steps (forward, backward, AdamW) of five models beside PyTorch, eager and compiled.

    Prints Markdown tables of medians, ratios and peak memory, and of how the step grows with the model. Takes
    about ten minutes and needs PyTorch: pip install 'ort-ops[cpu,bench]'.
    """
    try:
        from rich.console import Console
        from rich.progress import track

        from ort_ops import bench_step as benchmark
        from ort_ops.bench import versions
        from ort_ops.bench_models import CASES, GROWTH_CASES

        summary = versions()
    except ImportError as error:
        typer.echo(f"{error}; the benchmark needs: pip install 'ort-ops[cpu,bench]'", err=True)
        raise typer.Exit(1) from error
    console = Console(stderr=True)
    rows = [
        benchmark.measure(case, threads, rounds, peer_python=peer_python)
        for case in track(CASES, description="models", console=console)
    ]
    growth = [
        row
        for grown in track(GROWTH_CASES, description="growth", console=console)
        for row in benchmark.measure_growth(grown, threads, rounds)
    ]
    typer.echo(f"{summary}, {threads} threads, medians of {rounds} rounds\n")
    typer.echo(benchmark.markdown(rows))
    typer.echo()
    typer.echo(benchmark.growth_markdown(growth))
