"""The pages in docs say what their code prints: each block is run, and the output compared with the page."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "docs"

BLOCK = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?![\w.])")

TOLERANCE = 0.03
"""Of numbers with a decimal point, which are rounded to two digits: processors add in different orders, and a
training carries that on."""


def assert_same_output(got: str, page: str) -> None:
    """Equal but for numbers with a decimal point, which may differ a little."""
    assert NUMBER.sub("#", got) == NUMBER.sub("#", page), got
    np.testing.assert_allclose(
        [float(number) for number in NUMBER.findall(got)],
        [float(number) for number in NUMBER.findall(page)],
        rtol=0.2,
        atol=TOLERANCE,
    )


def test_what_the_page_prints_is_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (FOLDER / "from_pytorch_to_fine_tuned.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    assert len(blocks) == page.count("```python")
    namespace: dict[str, Any] = {"__name__": "page"}
    for code, output in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "page", "exec"), namespace)
        assert_same_output(printed.getvalue(), output)


@pytest.mark.parametrize("got", ["loss 0.39\n", "loses 0.30\n", "loss 0.30 of 2\n"])
def test_another_output_is_told_apart(got: str) -> None:
    assert_same_output("loss 0.31\n", "loss 0.30\n")
    with pytest.raises(AssertionError):
        assert_same_output(got, "loss 0.30\n")
