"""Writing the files of a training: all of them beside their place first, then moved there."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import onnx

from ort_ops.training.checkpoint import Checkpoint, save_checkpoint
from ort_ops.training.whole_files import whole_files

_LARGEST_MESSAGE_BYTES = 2**31 - 1
"""Protocol buffers end here."""


def write_artifacts(
    folder: Path,
    prefix: str,
    models: Mapping[str, onnx.ModelProto],
    checkpoint: Checkpoint,
    *,
    nominal_checkpoint: bool,
    ort_format: bool,
    custom_op_library: Path | None,
) -> None:
    """Write `<prefix><name>.onnx` for each model by name, and the checkpoint; see `generate_artifacts`.

    Whatever fails, `folder` then has the files that it had before.
    """
    if os.path.basename(prefix) != prefix:
        raise ValueError(
            f"generate_artifacts: prefix must be the beginning of a file's name, without folders; got "
            f"{prefix!r}. Use artifact_directory for the folder."
        )
    for name, model in models.items():
        _check_size(name, model)
    with whole_files(folder) as unfinished:
        for name, model in models.items():
            file = unfinished / f"{prefix}{name}.onnx"
            onnx.save(model, file)
            if ort_format:
                _write_ort_format(file, custom_op_library)
        save_checkpoint(unfinished / f"{prefix}checkpoint", checkpoint)
        if nominal_checkpoint:
            nominal = dataclasses.replace(checkpoint, nominal=True)
            save_checkpoint(unfinished / f"{prefix}nominal_checkpoint", nominal)


def _check_size(name: str, model: onnx.ModelProto) -> None:
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if size > _LARGEST_MESSAGE_BYTES:
        raise ValueError(
            f"generate_artifacts: the constants of {name} take {size} bytes, and an ONNX file ends at "
            f"{_LARGEST_MESSAGE_BYTES}. Name the model's weights in requires_grad or frozen_params (patterns "
            "are allowed), so that they are in the checkpoint."
        )


def _write_ort_format(file: Path, custom_op_library: Path | None) -> None:
    """Convert a model with ONNX Runtime's own tool, which writes beside `file`."""
    from onnxruntime.tools.convert_onnx_models_to_ort import (  # only who asks for the format needs the tool
        OptimizationStyle,
        convert_onnx_models_to_ort,
    )

    talk = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(talk), contextlib.redirect_stderr(talk):
            convert_onnx_models_to_ort(
                file, optimization_styles=[OptimizationStyle.Fixed], custom_op_library_path=custom_op_library
            )
    except Exception as error:  # the tool raises whatever stopped it
        raise RuntimeError(
            f"generate_artifacts: ONNX Runtime cannot convert {file.name} to its own format: {error}. Leave "
            "out ort_format, or give the custom_op_library that the model needs."
        ) from error
    finally:
        logging.disable(level)
    if not file.with_suffix(".ort").is_file():
        raise RuntimeError(
            f"generate_artifacts: ONNX Runtime's tool wrote no .ort file for {file.name}: {talk.getvalue()}"
        )
