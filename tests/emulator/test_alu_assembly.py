"""The instructions that other tests execute are spelled as llvm-objdump prints them, on every chip that has them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from alu_harness import ALL, Case
from test_alu_convert import CASES as CONVERSIONS
from test_alu_float import CASES as FLOATS
from test_alu_integer import CASES as INTEGERS
from test_alu_rest import CASES as REST
from test_alu_scalar import CASES as SCALARS
from test_matrix import CASES as MATRICES
from test_matrix import EVERY, operands, span

RELEASES = ("-22", "-21", "-20", "-19", "")
CASES: list[Case] = [*SCALARS, *INTEGERS, *FLOATS, *CONVERSIONS, *REST]


def tool(name: str) -> str:
    found = next(filter(None, (shutil.which(name + release) for release in RELEASES)), None)
    if found is None:
        pytest.skip(f"needs {name} 19 or later")
    return found


def matrix_text(name: str) -> str:
    size, depth, blocks, kind_a, kind_b = EVERY[name]
    sums = span(0, size * size * blocks // 64, "a")
    first, second = operands(size, depth, blocks, kind_a), operands(size, depth, blocks, kind_b)
    return f"{name} {sums}, {span(0, first)}, {span(32, second)}, {sums}"


@pytest.mark.parametrize("arch", ALL)
def test_texts_survive_assembly_and_disassembly(arch: str, tmp_path: Path) -> None:
    clang, objdump = tool("clang"), tool("llvm-objdump")
    texts = [case.text(arch) for case in CASES if arch in case.archs]
    texts += [matrix_text(name) for name, having in MATRICES if having == arch]
    source, built = tmp_path / "unit.s", tmp_path / "unit.o"
    source.write_text("\n".join(texts) + "\n")
    command = [clang, "-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-c"]
    done = subprocess.run([*command, str(source), "-o", str(built)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    printed = subprocess.run([objdump, "-d", str(built)], capture_output=True, text=True, check=True).stdout
    back = [line.partition("//")[0].strip() for line in printed.splitlines() if line.startswith("\t")]
    assert len(back) == len(texts) > 100
    assert [(x, y) for x, y in zip(texts, back, strict=True) if x != y] == []
