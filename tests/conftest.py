"""Makes the helper modules in this folder importable from the tests in its subfolders, adds the option
--library, and has the longest test files begin first where several processes share the work.

pytest puts the folder of each conftest.py it finds on the path.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--library",
        help="test the kernels of this shared library instead of the installed one (e.g. a sanitizer build)",
    )


# They compile: one of them begun last would keep one process busy for minutes after the others are done.
_LONGEST_FILES = ("test_sanitizers.py", "test_cuda_sanitizers.py", "test_cuda_compilation.py")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONGEST_FILES)
