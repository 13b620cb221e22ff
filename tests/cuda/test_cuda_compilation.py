"""The kernels as nvcc compiles them for one architecture: registers, spills, 16-byte accesses.

compiled_kernels.py looks at all architectures.
"""

from __future__ import annotations

import shutil

import pytest
from compiled_kernels import broken_rules, compile_kernels, count_accesses, find_tool

ARCHITECTURE = "90"
ADD_LAYER_NORM_GRAD_KERNELS = 3 * (3 + 2 + 2) + 1
OTHER_KERNELS = 3 * 3 + 1 + 3 + 4 + 2 + 2 + 2  # three operators in three types, AdamW, attention, ...
KERNELS = ADD_LAYER_NORM_GRAD_KERNELS + OTHER_KERNELS

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    return compile_kernels(ARCHITECTURE, tmp_path_factory.mktemp("compiled"))


def test_registers_and_spills(compiled: tuple) -> None:
    _, kernels = compiled
    assert len(kernels) == len({kernel.name for kernel in kernels.values()}) == KERNELS
    assert all(kernel.registers > 0 for kernel in kernels.values())
    assert broken_rules(ARCHITECTURE, kernels) == []


def test_accesses_to_memory(compiled: tuple) -> None:
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        pytest.skip("cuobjdump, which reads the machine code, was not found")
    outputs, kernels = compiled
    count_accesses(cuobjdump, outputs, kernels)
    assert all(kernel.accesses for kernel in kernels.values())
    assert broken_rules(ARCHITECTURE, kernels) == []


def test_a_broken_rule_is_told(compiled: tuple) -> None:
    _, kernels = compiled
    for kernel in kernels.values():
        kernel.spilled_bytes += 100
    assert len(broken_rules(ARCHITECTURE, kernels)) == KERNELS
