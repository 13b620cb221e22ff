"""Compiles the CUDA kernels with nvcc and reads what became of them: registers, spills, accesses to memory.

    python tests/cuda/compiled_kernels.py [architecture ...]

prints a table for each architecture, e.g. 90, and ends with 1 where a kernel breaks a rule. It needs nvcc;
the accesses are read from the machine code with cuobjdump, where that is found. Without architectures: those
that the library is built for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "cpp" / "src"
KERNEL_SOURCES = (SOURCES / "add_layer_norm_grad" / "cuda.cu", SOURCES / "cuda_kernels.cu")
ARCHITECTURES = ("75", "80", "90", "100", "120")

# Registers of a thread that let as many threads stay on a multiprocessor as cuda_limits.h says.
MAX_REGISTERS = {"8": 64, "16": 80, "32": 128}
# sm_75 copies through registers what newer devices copy past them: there a few bytes are spilled.
MAX_SPILLED_BYTES = {"75": 16}
# Those that move 16 bytes at a time wherever their tensors are aligned; what they write, too, but for some
# whose results are few.
READS_VECTORS = {"AdamW", "AddLayerNorm", "CrossEntropy", "CrossEntropyGrad", "GeluGrad", "ReluGrad"}
READS_VECTORS |= {"SumPieces<4>", "WriteGradients<4>"}
WRITES_FEW = {"CrossEntropy", "SumPieces<4>"}


@dataclass
class Kernel:
    """One compiled kernel, e.g. RowsInShared<float, 8>."""

    name: str
    registers: int = 0
    spilled_bytes: int = 0
    accesses: Counter[str] = field(default_factory=Counter)


def find_tool(name: str) -> str | None:
    """On the PATH, or beside nvcc's machine-code tools of a Python package."""
    found = shutil.which(name)
    packaged = sorted(Path(sys.prefix).glob(f"lib/python*/site-packages/nvidia/*/bin/{name}"))
    return found or next(map(str, packaged), None)


def compile_kernels(architecture: str, folder: Path) -> tuple[list[Path], dict[str, Kernel]]:
    """(the object files, the kernels by their mangled names)."""
    outputs = []
    kernels: dict[str, Kernel] = {}
    for i, source in enumerate(KERNEL_SOURCES):
        output = folder / f"sm_{architecture}_{i}.o"
        command = [
            *("nvcc", "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-Xptxas", "-v"),
            *("-I", str(SOURCES), "-I", str(ROOT / "cpp" / "include")),
            *("-c", str(source), "-o", str(output)),
        ]
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{completed.stderr}")
        outputs.append(output)
        for line in completed.stderr.splitlines():
            if found := re.search(r"Compiling entry function '(\w+)'", line):
                kernel = kernels.setdefault(found[1], Kernel(readable_name(found[1])))
            elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
                kernel.spilled_bytes = max(int(found[1]), int(found[2]))
            elif found := re.search(r"Used (\d+) registers", line):
                kernel.registers = int(found[1])
    return outputs, kernels


def readable_name(mangled: str) -> str:
    """_ZN7ort_ops9gelu_grad8GeluGradI6__halfEEv...: GeluGrad<half>."""

    def identifier(text: str) -> tuple[str, str]:
        found = re.match(r"(\d+)", text)
        if found is None:
            raise ValueError(f"no kernel's name: {mangled}")
        begin, length = found.end(), int(found[1])
        return text[begin : begin + length], text[begin + length :]

    _, rest = identifier(mangled.removeprefix("_ZN7ort_ops"))
    name, rest = identifier(rest)
    found = re.match(r"I((?:L[is]\d+E|6__half|13__nv_bfloat16|[fils])+)E", rest)
    if found is None:
        return name
    types = {"f": "float", "i": "int", "l": "long", "s": "short"}
    types |= {"6__half": "half", "13__nv_bfloat16": "bfloat16"}
    arguments = re.findall(r"L[is](\d+)E|(6__half|13__nv_bfloat16|[fils])", found[1])
    return f"{name}<{', '.join(number or types[kind] for number, kind in arguments)}>"


def count_accesses(cuobjdump: str, outputs: list[Path], kernels: dict[str, Kernel]) -> None:
    """Counts the instructions that reach memory by their kind, e.g. LDG.128 or LDGSTS.128."""
    kernel = None
    for line in _machine_code(cuobjdump, outputs):
        if found := re.search(r"Function : (\w+)", line):
            kernel = kernels[found[1]]
        elif kernel and (
            found := re.search(r"\s(LDGSTS|LDG|STG|LDL|STL|LD|ST|ATOM\w*|RED)(\.[\w.]+)? ", line)
        ):
            width = re.search(r"\.(128|64|U16|U8)\b", found[2] or "")
            kernel.accesses[found[1] + (f".{width[1]}" if width else "")] += 1


def _machine_code(cuobjdump: str, outputs: list[Path]) -> Iterator[str]:
    for output in outputs:
        command = [cuobjdump, "-sass", str(output)]
        yield from subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def broken_rules(architecture: str, kernels: dict[str, Kernel]) -> list[str]:
    """A sentence for each rule that a kernel breaks."""
    broken = []
    for kernel in kernels.values():
        limit = MAX_SPILLED_BYTES.get(architecture, 0)
        if kernel.spilled_bytes > limit:
            broken.append(f"{kernel.name} spills {kernel.spilled_bytes} bytes, more than {limit}")
        in_shared = re.fullmatch(r"RowsInShared<\w+, (\d+)>", kernel.name)
        if in_shared and kernel.registers > MAX_REGISTERS[in_shared[1]]:
            broken.append(f"{kernel.name} uses {kernel.registers} registers of {MAX_REGISTERS[in_shared[1]]}")
        if not kernel.accesses:
            continue
        for kind in ("LD", "ST", "ATOM", "RED"):
            if any(name.split(".")[0] == kind for name in kernel.accesses):
                broken.append(f"{kernel.name} reaches memory by {kind}")
        if in_shared:
            # 4 loads of 32 bits: this row's and the next one's mean and rstd; 2 stores: the sums over rows.
            wide = "LDG.128" if architecture == "75" else "LDGSTS.128"
            if not kernel.accesses[wide] or not kernel.accesses["STG.128"]:
                broken.append(f"{kernel.name} does not move 16 bytes at a time")
            if kernel.accesses["LDG"] > 4 or kernel.accesses["STG"] > 2 or kernel.accesses["LDG.U16"]:
                broken.append(f"{kernel.name} reaches its tensors in small pieces: {dict(kernel.accesses)}")
        if READS_VECTORS & {kernel.name, kernel.name.split("<")[0]}:
            if not kernel.accesses["LDG.128"]:
                broken.append(f"{kernel.name} does not load 16 bytes at a time")
            if kernel.name not in WRITES_FEW and not kernel.accesses["STG.128"]:
                broken.append(f"{kernel.name} does not store 16 bytes at a time")
        if re.search(r"(RowSums|ColumnTiles)<\w+, [48]>", kernel.name) and not kernel.accesses["LDG.128"]:
            broken.append(f"{kernel.name} does not load 16 bytes at a time")
    return broken


def main(architectures: list[str]) -> int:
    cuobjdump = find_tool("cuobjdump")
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for architecture in architectures or ARCHITECTURES:
            outputs, kernels = compile_kernels(architecture, Path(folder))
            if cuobjdump:
                count_accesses(cuobjdump, outputs, kernels)
            print(f"sm_{architecture}: {'kernel':<28} registers  spilled bytes  accesses")
            for kernel in sorted(kernels.values(), key=lambda kernel: kernel.name):
                accesses = " ".join(f"{name}:{count}" for name, count in sorted(kernel.accesses.items()))
                print(
                    f"        {kernel.name:<28} {kernel.registers:>9}  {kernel.spilled_bytes:>13}  {accesses}"
                )
            for sentence in broken_rules(architecture, kernels):
                print(f"sm_{architecture}: {sentence}")
                status = 1
    if not cuobjdump:
        print("cuobjdump was not found, so the accesses were not checked")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
