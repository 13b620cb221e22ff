"""Files that belong together, written so that what was at their place stays until all of them are there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_files(folder: Path) -> Iterator[Path]:
    """A folder to write files in. They move to `folder`, which is made if it is missing, when the block ends
    without an error, and are gone otherwise.

    They move in the reverse order of their names: `model.onnx.data` before `model.onnx`, which needs it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        yield unfinished
        for file in sorted(unfinished.iterdir(), reverse=True):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(unfinished)
