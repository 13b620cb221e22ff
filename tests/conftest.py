"""Makes the helper modules in this folder importable from the tests in its subfolders, and adds the option
--library.

pytest puts the folder of each conftest.py it finds on the path.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--library",
        help="test the kernels of this shared library instead of the installed one (e.g. a sanitizer build)",
    )
