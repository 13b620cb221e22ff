"""The library under test, and one run of the tests for each instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from native import Library

import ort_ops


@pytest.fixture(scope="session")
def installed(request: pytest.FixtureRequest) -> Library:
    return Library(request.config.getoption("--library") or ort_ops.library_path())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "library" in metafunc.fixturenames:
        path = metafunc.config.getoption("--library") or ort_ops.library_path()
        metafunc.parametrize("library", Library(path).targets, indirect=True)


@pytest.fixture
def library(request: pytest.FixtureRequest, installed: Library) -> Iterator[Library]:
    """The library, held to one instruction set; what is in use is read back before and after."""
    installed.use_target(request.param)
    assert installed.target == request.param
    yield installed
    assert installed.target == request.param
    installed.use_target(None)
