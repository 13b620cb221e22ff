"""The emulated library, built once for all tests, or the one that --library names."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from emulated import EMULATED_SOURCES, EmulatedLibrary, compile_emulated  # noqa: E402


@pytest.fixture(scope="session")
def emulated_library_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--library")
    if given:
        return Path(given)
    # Of several processes that run tests the first one compiles, and the others wait for it.
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "libemulated.so"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path if path.exists() else compile_emulated(EMULATED_SOURCES, path)


@pytest.fixture
def library(emulated_library_path: Path) -> EmulatedLibrary:
    """Set back to the small device and the forward order for each test."""
    return EmulatedLibrary(emulated_library_path)


@pytest.fixture
def installed(library: EmulatedLibrary) -> EmulatedLibrary:
    """For the tests of the CPU's kernels that know no instruction sets, and run here as they are."""
    return library
