"""Every rule against central differences, with static and with unknown dims."""

from __future__ import annotations

import pytest
from cases import CASES
from finite_differences import check_case


@pytest.mark.parametrize("name", CASES)
def test_gradient(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dynamic])
def test_gradient_with_unknown_dims(name: str) -> None:
    check_case(CASES[name], dynamic=True)
