"""WMMA of gfx12 and gfx11 against values and places worked out by hand from the ISA documents, bit by bit, and that the
gradients of attention that are proposed for gfx1201 use no others.

"RDNA4 Instruction Set Architecture", 7.12, of A (16x16, 16 bits): lane l holds row l % 16, registers 0 to 3 the k of
8 * (l / 16) on, two to a register, the lower first; B likewise with columns; C and D: lane l holds column l % 16,
register r row r + 8 * (l / 16). "RDNA3 Instruction Set Architecture", 7.9: both halves of the wave hold all 16 k of a
row in eight registers; register r of C and D is row 2 * r + l / 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from alu_harness import empty_waves, execute
from proposals import attentions, owner

import tilewright_arch
from tilewright_emulator.code.compiler import WITHOUT_OBJDUMP, have_objdump
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.workers.process import Limits
from tilewright_tools.analysis.disassembly import Disassembler

THREE_HALVES, TWO = {"f16": 0x3E00, "bf16": 0x3FC0}, {"f16": 0x4000, "bf16": 0x4000}
"""1.5 and 2."""
ONE, FOUR, MINUS = 0x3F800000, 0x40800000, 0x8000
"""1, and 1.5 * 2 + 1, as fp32; the sign of 16 bits."""
PLACES = [(0, 0, 0), (3, 1, 14), (15, 15, 15), (8, 7, 1), (7, 8, 9), (12, 5, 2), (1, 11, 15), (9, 2, 7)]
"""Row i, k, column j."""


def place(line: int, k: int, arch: str) -> list[tuple[int, int, int]]:
    """Lanes, register and half of an element of an operand."""
    if arch == "gfx1100":
        return [(line, k // 2, k % 2), (line + 16, k // 2, k % 2)]
    return [(line + 16 * (k // 8), k % 8 // 2, k % 2)]


def result(i: int, j: int, arch: str) -> tuple[int, int]:
    """Lane and register of an element of the result."""
    return (j + 16 * (i % 2), i // 2) if arch == "gfx1100" else (j + 16 * (i // 8), i % 8)


@pytest.mark.parametrize("arch", ["gfx1201", "gfx1100"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_one_product_lands_where_the_document_says(kind: str, arch: str) -> None:
    count = 8 if arch == "gfx1100" else 4
    for sign in (0, MINUS):
        for i, k, j in PLACES:
            w = empty_waves(arch)
            for register in range(2 * 16):
                w.u32[register][...] = 0
            for register in range(8):
                w.u32[32 + register][...] = ONE
            for first, line, bits in ((0, i, THREE_HALVES[kind] | sign), (16, j, TWO[kind])):
                for lane, register, half in place(line, k, arch):
                    w.u32[first + register][:, lane] |= np.uint32(bits << 16 * half)
            text = f"v_wmma_f32_16x16x16_{kind} v[32:39], v[0:{count - 1}], v[16:{15 + count}], v[32:39]"
            execute(arch, text, w)
            lane, register = result(i, j, arch)
            seen = np.stack([w.u32[32 + row] for row in range(8)])
            wanted = np.full_like(seen, ONE)
            wanted[register, :, lane] = 0xC0000000 if sign else FOUR  # 1 - 3, 1 + 3
            np.testing.assert_array_equal(seen, wanted)


@pytest.fixture
def toolchain() -> Iterator[HipToolchain]:
    toolchain = HipToolchain([include_dir()], limits=Limits(timeout_s=900))
    try:
        toolchain.identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    yield toolchain
    toolchain.close()


@pytest.mark.extended
@pytest.mark.skipif(not have_objdump(), reason=WITHOUT_OBJDUMP)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_gradients_proposed_for_gfx1201_use_these_instructions_only(
    dtype: str, toolchain: HipToolchain, tmp_path: Path
) -> None:
    """Heads of 64 and 128, of 128 and of 4096 queries, with a causal mask: the first proposal of each."""
    spec, operation = tilewright_arch.load("gfx1201"), owner("attention_backward")
    kernels: dict[KernelConfig, None] = {}
    for request in attentions("attention_backward"):
        q, words = request.inputs["q"], request.attributes
        if q.dtype.value == dtype and q.shape[2:] in ((128, 64), (4096, 128)) and words.get("causal"):
            candidates = operation.candidates(operation.parse(request), device_of(spec))
            kernels[next(iter(candidates))] = None
    found = set()
    for number, config in enumerate(kernels):
        folder = tmp_path / str(number)
        folder.mkdir()
        image = toolchain.compile(operation.generate(config, spec), folder, spec).binary.read_bytes()
        (function,) = Disassembler().disassemble(image)
        found |= {item.mnemonic for item in function.instructions if item.mnemonic.startswith(("v_wmma", "v_swmmac"))}
    assert len(kernels) >= 2 and found == {f"v_wmma_f32_16x16x16_{'f16' if dtype == 'fp16' else dtype}"}
