"""The command `ort-ops`."""

from __future__ import annotations

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
