"""The command `ort-ops`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="ort-ops",
    help="Train transformers with the stock ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Train transformers with the stock ONNX Runtime."""


@app.command()
def info() -> None:
    """Show what was found, what was built, and what can run here."""
    from ort_ops.library import describe

    facts = describe()
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")


@app.command()
def bench(
    threads: Annotated[int, typer.Option(min=1, help="Threads of every candidate.")] = 2,
    rounds: Annotated[int, typer.Option(min=3, help="How often the candidates take turns.")] = 15,
) -> None:
    """Time AddLayerNormGrad beside PyTorch (eager and compiled) and the machine's streaming floor.

    Prints a Markdown table of medians and ratios. Takes about five minutes and needs PyTorch:
    pip install 'ort-ops[cpu,bench]'.
    """
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
