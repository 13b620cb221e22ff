"""Models as callers give them: a message, its bytes, or a file with external data beside it."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

Model = onnx.ModelProto | bytes | str | os.PathLike[str]
"""A model, its bytes, or the path of its file, beside which its external data may lie."""


def read_model(model: Model, *, external_data: bool) -> onnx.ModelProto:
    """The model as a message: itself if it is one. Tensors in external files are read if `external_data`.

    Raises TypeError for an argument of another kind, FileNotFoundError when there is no file, ValueError for
    what is no ONNX model, or has no external data where it says.
    """
    if isinstance(model, onnx.ModelProto):
        message, what = model, "the ModelProto that was given"
    elif isinstance(model, bytes):
        what = "what the bytes that were given hold"
        message = _parsed(model, what)
    elif isinstance(model, (str, os.PathLike)):
        path = existing_file(model)
        what = f"'{path}'"
        message = _parsed(path.read_bytes(), what)
        if external_data:
            _load_external_data(message, path)
    else:
        raise TypeError(
            "A model must be an onnx.ModelProto, its bytes or the path of its file; got "
            f"{type(model).__name__}."
        )
    if not message.HasField("graph") or not message.opset_import:
        raise ValueError(f"A model must be an ONNX model; {what} has no graph or imports no operators.")
    return message


def existing_file(path: str | os.PathLike[str]) -> Path:
    """`path`, or FileNotFoundError in a sentence."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no model file at '{path}'. Check the path.")
    return path


def _parsed(content: bytes, what: str) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(content)
    except DecodeError as error:
        raise ValueError(f"A model must be an ONNX model; {what} is none.") from error


def _load_external_data(model: onnx.ModelProto, path: Path) -> None:
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (onnx.checker.ValidationError, OSError, ValueError) as error:
        raise ValueError(
            f"The external data of '{path}' cannot be read: {error}. Keep its files, whole, beside it."
        ) from error
