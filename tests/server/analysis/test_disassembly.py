"""What llvm-objdump prints becomes a structure; what the ELF file says of its kernels is read without a tool."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import InternalError, InvalidArgumentError, ToolchainMissingError
from tilewright_server.build.toolchains.code_object import _Reader, read_code_object
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_tools.analysis import disassembly
from tilewright_tools.analysis.disassembly import Disassembler, parse

LISTING = """
/tmp/x.co:	file format elf64-amdgpu

Disassembly of section .text:

0000000000001600 <first>:
	s_load_dwordx4 s[4:7], s[0:1], 0x0                         // 000000001600: C00A0100 00000000
	s_waitcnt vmcnt(1) lgkmcnt(0)                              // 000000001608: BF8C0071
	v_mfma_f32_32x32x8_f16 v[2:17], v[22:23], v[20:21], v[2:17]// 00000000160C: D3CC0002 040A2916
	v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] op_sel_hi:[1,0,1] // 000000001614: D3B04000 1C120902
	ds_read2_b64 v[0:3], v4 offset0:1 offset1:32               // 00000000161C: D8EE2001 00000004
	buffer_load_dwordx4 v[8:11], v4, s[8:11], 0 offen offset:16// 000000001624: E05C1010 80020804
	v_add_f32_e64 v1, |v2|, -v3                                // 00000000162C: D1010101 40020702
	s_cbranch_scc0 65526                                       // 000000001634: BF84FFF6 <first+0x10>
	s_nop 0                                                    // 000000001638: BF800000

0000000000001700 <second>:
	v_dual_fmac_f32 v1, v2, v3 :: v_dual_mov_b32 v4, 0         // 000000001700: C8100702 01040080
	s_wait_loadcnt_dscnt 0x102                                 // 000000001708: BFC80102
	global_load_b128 v[0:3], v[4:5], off offset:64 th:TH_LOAD_NT// 00000000170C: EE05C07C 00000000 00004004
	s_delay_alu instid0(VALU_DEP_1) | instskip(NEXT) | instid1(SALU_CYCLE_1)// 000000001718: BF870481
	v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]  // 00000000171C: CC404000 1C022108
	s_branch 2                                                 // 000000001724: BFA00002 <second+0x30>
"""


def test_functions_and_their_instructions_are_read() -> None:
    first, second = parse(LISTING)
    assert (first.name, first.address, len(first.instructions)) == ("first", 0x1600, 9)
    assert (second.name, second.address, len(second.instructions)) == ("second", 0x1700, 6)
    load, wait, mfma, packed, lds, buffer, add, branch, _ = first.instructions
    assert (load.mnemonic, load.operands, load.modifiers) == ("s_load_dwordx4", ("s[4:7]", "s[0:1]", "0x0"), ())
    assert (load.address, load.size, load.words) == (0x1600, 8, (0xC00A0100, 0))
    assert wait.operands == ("vmcnt(1)", "lgkmcnt(0)")
    assert mfma.operands == ("v[2:17]", "v[22:23]", "v[20:21]", "v[2:17]")
    assert packed.modifiers == ("op_sel_hi:[1,0,1]",)
    assert (lds.operands, lds.modifier("offset1"), lds.modifier("gds")) == (("v[0:3]", "v4"), "32", None)
    assert (buffer.operands[-1], buffer.modifiers) == ("0", ("offen", "offset:16"))
    assert (buffer.modifier("offen"), buffer.modifier("offset")) == ("", "16")
    assert add.operands == ("v1", "|v2|", "-v3")
    assert branch.target == 0x1634 + 4 - 4 * 10


def test_later_generations_are_read() -> None:
    _, second = parse(LISTING)
    dual, wait, load, delay, wmma, branch = second.instructions
    assert dual.dual is not None
    assert (dual.mnemonic, dual.dual.mnemonic, dual.dual.operands) == ("v_dual_fmac_f32", "v_dual_mov_b32", ("v4", "0"))
    assert (dual.size, dual.dual.size) == (8, 0)
    assert wait.operands == ("0x102",)
    assert (load.operands, load.modifiers, load.size) == (
        ("v[0:3]", "v[4:5]", "off"), ("offset:64", "th:TH_LOAD_NT"), 12,
    )  # fmt: skip
    assert delay.operands[0] == "instid0(VALU_DEP_1)"
    assert wmma.operands == ("v[0:7]", "v[8:15]", "v[16:23]", "v[0:7]")
    assert branch.target == 0x1724 + 4 + 8


def test_text_is_what_was_printed() -> None:
    printed = [line.split("//")[0].strip() for line in LISTING.splitlines() if "//" in line]
    found = [instruction.text for item in parse(LISTING) for instruction in item.instructions]
    assert found == [" ".join(line.split()) for line in printed]


def _tool() -> Disassembler:
    try:
        disassembler = Disassembler()
        disassembler.find()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    return disassembler


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """A small kernel for an arch."""
    toolchain = HipToolchain([])
    try:
        toolchain.identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    text = """
extern "C" __attribute__((global)) void scale(float* x, float by, int n) {
  __attribute__((shared)) static float lds[64];
  int lane = __builtin_amdgcn_workitem_id_x();
  for (int i = lane; i < n; i += 64) { lds[lane ^ 1] = x[i]; __builtin_amdgcn_s_barrier(); x[i] = lds[lane] * by; }
}
"""
    unit = SourceUnit(name="scale", language="hip", text=text, entries={"main": "scale"}, plugin_version="1")

    def build(arch: str) -> bytes:
        folder = tmp_path_factory.mktemp(arch)
        return toolchain.compile(unit, folder, tilewright_arch.load(arch)).binary.read_bytes()

    return build


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_real_code_objects_are_read_whole(arch: str, compiled: Callable[[str], bytes]) -> None:
    image = compiled(arch)
    code = read_code_object(image)
    kernel = code.kernel("scale")
    assert (code.target, kernel.descriptor, kernel.kernarg_bytes) == (arch, "scale.kd", 16)
    assert (kernel.lds_bytes, kernel.scratch_bytes, kernel.vgpr_spills) == (256, 0, 0)
    assert kernel.wave == tilewright_arch.load(arch).wave_size
    (found,) = _tool().disassemble(image)
    assert found.name == "scale"
    # Nothing is lost: every instruction begins where the one before it ends.
    assert [item.address for item in found.instructions[1:]] == [
        item.address + item.size for item in found.instructions[:-1]
    ]
    names = {item.mnemonic for item in found.instructions}
    assert "s_endpgm" in names
    assert any(name.startswith("ds_") for name in names)
    addresses = {item.address for item in found.instructions}
    targets = {item.target for item in found.instructions if item.target is not None}
    assert targets
    assert targets <= addresses


def test_what_is_no_code_object_is_refused(compiled: Callable[[str], bytes]) -> None:
    image = compiled("gfx942")
    host = Path(shutil.which("sh") or "/bin/sh").read_bytes()
    for data in (b"", b"nonsense", host, image[:200], image.replace(b"amdhsa.kernels", b"amdhsa.kernelz")[:600]):
        with pytest.raises(InvalidArgumentError) as caught:
            read_code_object(data)
        assert caught.value.rule == "code_object"
    with pytest.raises(InvalidArgumentError, match="no such kernel"):
        read_code_object(image).kernel("other")
    with pytest.raises(InternalError, match="could not read the code object"):
        _tool().disassemble(b"nonsense")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x07", 7),
        (b"\xff", -1),
        (b"\xa2hi", "hi"),
        (b"\x82\xa1a\x01\xa1b\xc3", {"a": 1, "b": True}),
        (b"\x93\xc0\xc2\xcd\x01\x00", [None, False, 256]),
        (b"\xd1\xff\x00", -256),
        (b"\xcf" + b"\0" * 7 + b"\x09", 9),
        (b"\xd9\x03abc", "abc"),
        (b"\xda\x00\x03abc", "abc"),
        (b"\xc4\x02\x00\x01", b"\x00\x01"),
        (b"\xdc\x00\x02\x01\x02", [1, 2]),
        (b"\xde\x00\x01\xa1k\xcb?\xf8" + b"\0" * 6, {"k": 1.5}),
    ],
)
def test_metadata_values_of_every_form_are_read(data: bytes, value: object) -> None:
    assert _Reader(data).value() == value


def test_unknown_tag_is_an_error() -> None:
    with pytest.raises(ValueError, match="0xc1"):
        _Reader(b"\xc1").value()


def _fake(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)


def test_the_first_tool_that_is_new_enough_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "_ROCM", ())
    _fake(tmp_path / "llvm-objdump", "LLVM version 14.0.6\n    amdgcn - AMD")
    _fake(tmp_path / "llvm-objdump-21", "LLVM version 21.1.0\n    x86-64 - X86")
    with pytest.raises(ToolchainMissingError) as caught:
        Disassembler(search_path=str(tmp_path)).find()
    assert "apt-get install llvm-22" in caught.value.fix
    _fake(tmp_path / "llvm-objdump-19", "LLVM version 19.1.7\n    amdgcn - AMD")
    assert Disassembler(search_path=str(tmp_path)).find() == tmp_path / "llvm-objdump-19"
    assert Disassembler(str(tmp_path / "llvm-objdump-19")).find() == tmp_path / "llvm-objdump-19"


def test_configured_tool_is_not_replaced_by_another(tmp_path: Path) -> None:
    with pytest.raises(ToolchainMissingError) as caught:
        Disassembler("no-such-objdump").find()
    assert (caught.value.field, caught.value.value) == ("llvm_objdump", "no-such-objdump")
    _fake(tmp_path / "old", "LLVM version 14.0.6\n    amdgcn - AMD")
    with pytest.raises(ToolchainMissingError, match="older than 19"):
        Disassembler(str(tmp_path / "old")).find()
