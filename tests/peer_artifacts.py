"""Artifacts of onnxruntime-training for tests, made by peer_script.py in an interpreter of its own.

old_runtime.py says which interpreter; for these tests it needs onnxruntime-training 1.19.2 and torch.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from old_runtime import run_in_old_runtime

SCRIPT = Path(__file__).with_name("peer_script.py")

RESUMED, COMPARED = 5, 20
"""Steps after which peer_script.py saves a checkpoint, and the parameters; it makes 25."""

LEARNING_RATE = 0.01

TRAINED = [
    "convolutions",
    "frozen",
    "kept_addends",
    "parallel",
    "post_norm",
    "pre_norm",
    "shared_norm",
    "two_norms",
]
WITH_DROPOUT = ["dropout_post", "dropout_pre"]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="peer_artifacts_")
    run_in_old_runtime(SCRIPT, Path(folder.name))
    return folder


def peer_artifacts(model: str) -> Path:
    """The folder of a model's artifacts; made once for all tests of the process, and not to be changed."""
    return Path(_folder().name) / model
