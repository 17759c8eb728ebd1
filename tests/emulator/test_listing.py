"""Code objects that carry the assembler's listing are read without llvm-objdump, as llvm-objdump reads them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from amd_config import ARCHS, FLAGS, AmdConfig
from emulator_compile import PRELUDE
from gemm_mutants import COMPV3, COMPV4, Mutant

from tilewright_emulator import CodeObject
from tilewright_emulator.code import image as reader
from tilewright_emulator.code.compiler import MISSING, compiler, have_objdump
from tilewright_emulator.code.elf import Elf
from tilewright_emulator.code.image import disassembled
from tilewright_emulator.code.listing import disassembly
from tilewright_emulator.errors import BadCodeObject, ToolMissing
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_tools.analysis.disassembly import Disassembler, Function, parse

CALLS = """
__attribute__((device)) const u32 table[4] = {3, 1, 4, 1};
NOINLINE u32 other(u32 x) { return x * table[x & 3]; }
KERNEL(64) calls(u32* out) { u32 sum = 0; for (u32 i = 0; i < out[1]; i++) sum += other(sum + out[i]); *out = sum; }
NOINLINE int fibonacci(int x) { return x < 2 ? x : fibonacci(x - 1) + fibonacci(x - 2); }
KERNEL(64) stack(int* out) { *out = fibonacci(out[1]); }
"""


def listed(folder: Path, text: str, arch: str) -> bytes:
    command = compiler(folder, listed=True)
    if command is None:
        pytest.skip(f"needs {MISSING}")
    source, output = folder / f"{arch}.hip", folder / f"{arch}.co"
    source.write_text(text)
    options = [*FLAGS, "-Wno-unused-function", f"--offload-arch={arch}"]
    subprocess.run([*command, *options, str(source), "-o", str(output)], check=True)
    return output.read_bytes()


def gemm(pipeline: dict[str, object], arch: str) -> str:
    config: AmdConfig = Mutant("none", "", "", "", pipeline).kernel(arch)
    return config.unit("kernel")


def plain(text: str) -> str:
    """Three spellings are the disassembler's alone: of a literal that could be shorter, of minus one, of no offset."""
    text = re.sub(r"lit\((\w+)\)", r"\1", text).replace("s_barrier_wait 0xffff", "s_barrier_wait -1")
    return re.sub(r"^(s_load_.*), null$", r"\1, 0x0", text)


def told(function: Function) -> list[tuple[object, ...]]:
    """Up to the end of the program: behind it there is only what fills the segment."""
    every = [(item.address, plain(item.text), item.words, item.target) for item in function.instructions]
    last = max(at for at, item in enumerate(function.instructions) if item.mnemonic in ("s_endpgm", "s_setpc_b64"))
    return every[: last + 1]


@pytest.mark.skipif(not have_objdump(), reason="needs llvm-objdump 19 or later, to compare with")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["calls", "compv3", "compv4"])
@pytest.mark.some(2)
def test_the_listing_says_what_the_disassembler_says(kind: str, arch: str, tmp_path: Path) -> None:
    text = PRELUDE + CALLS if kind == "calls" else gemm({"compv3": COMPV3, "compv4": COMPV4}[kind], arch)
    image = listed(tmp_path, text, arch)
    mine = {function.name: told(function) for function in parse(disassembly(Elf(image)))}
    its = {function.name: told(function) for function in disassembled(image) if function.name in mine}
    assert set(mine) == set(its) and len(mine) == (4 if kind == "calls" else 1)
    for name, lines in mine.items():
        assert lines == its[name]


def missing(self: Disassembler, image: bytes) -> tuple[Function, ...]:
    raise ToolchainMissingError("no llvm-objdump", fix="install it")


def test_without_a_disassembler_the_listing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = listed(tmp_path, PRELUDE + CALLS, "gfx942")
    monkeypatch.setattr(Disassembler, "disassemble", missing)
    program = reader.Image(image)
    assert [entry[".name"] for entry in program.elf.metadata["amdhsa.kernels"]] == ["calls", "stack"]
    assert {item.mnemonic for item in program.printed} >= {"s_endpgm", "s_swappc_b64"}


def test_without_either_the_error_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = listed(tmp_path, PRELUDE + CALLS, "gfx942").replace(b".tilewright.listing", b".something.unknown.")
    monkeypatch.setattr(Disassembler, "disassemble", missing)
    with pytest.raises(ToolMissing, match="compile with a listing"):
        CodeObject(image)


def test_a_listing_of_other_code_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = listed(tmp_path, PRELUDE + CALLS, "gfx942")
    endings = b"[0x00,0x00,0x81,0xbf]"
    assert endings in image
    monkeypatch.setattr(Disassembler, "disassemble", missing)
    with pytest.raises(BadCodeObject, match="the listing is of other code"):
        CodeObject(image.replace(endings, b"[0x00,0x00,0x82,0xbf]"))
