"""The rates of AMD GPUs: against the data sheets' peaks, and against LLVM's scheduling model."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest

import tilewright_arch as arch
from tilewright_arch import MatrixRate, Rates, SpecError

GPUS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
MCA = next((name for name in ("llvm-mca-22", "llvm-mca-21", "llvm-mca-20") if shutil.which(name)), "")


def rates_of(name: str) -> Rates:
    rates = arch.load(name).rates
    assert rates is not None
    return rates


def dtype_of(mnemonic: str) -> str:
    """The element type that an instruction multiplies."""
    end = mnemonic.removesuffix("_1k")
    if end.endswith("f8f6f4"):
        return "fp8"
    names = {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "i8": "int8", "u8": "int8", "fp8": "fp8", "bf8": "bf8"}
    return next(dtype for suffix, dtype in names.items() if end.endswith(suffix))


@pytest.mark.parametrize("name", GPUS)
def test_the_fastest_instruction_of_each_type_gives_the_data_sheets_peak(name: str) -> None:
    rates, peaks = rates_of(name), arch.load(name).throughput.flops_per_cycle_per_unit
    best: dict[str, int] = {}
    for mnemonic, rate in rates.matrix.items():
        per_cycle = rate.flops * rates.simds // rate.cycles
        for dtype in ("fp8", "bf8") if mnemonic.endswith("f8f6f4") else (dtype_of(mnemonic),):
            best[dtype] = max(best.get(dtype, 0), per_cycle)
    assert best
    assert {dtype: peaks[dtype] for dtype in best} == best


@pytest.mark.parametrize("name", GPUS)
def test_mnemonics_say_the_tile(name: str) -> None:
    for mnemonic, rate in rates_of(name).matrix.items():
        found = re.search(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b_)?", mnemonic)
        assert found is not None, mnemonic
        assert (rate.m, rate.n, rate.k) == tuple(int(size) for size in found.groups()[:3]), mnemonic
        if found[4]:
            assert rate.blocks == int(found[4]), mnemonic


def operands(name: str, mnemonic: str, rate: MatrixRate) -> str:
    """An instruction with registers of the right number, for a wave of 64."""
    bits = {"fp32": 32, "fp16": 16, "bf16": 16}.get(dtype_of(mnemonic), 8)
    lane = rate.m * rate.k * rate.blocks * bits // 32 // 64
    result = rate.m * rate.n * rate.blocks // 64
    a, b = (f"v{first}" if lane == 1 else f"v[{first}:{first + lane - 1}]" for first in (100, 120))
    c = f"v[0:{result - 1}]"
    assert name.startswith("gfx9")
    return f"{mnemonic} {c}, {a}, {b}, {c}"


@pytest.mark.skipif(not MCA, reason="llvm-mca 20 or later is not installed")
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950"])
def test_llvm_schedules_matrix_instructions_alike(name: str) -> None:
    """Its model counts passes of four cycles. It has f8f6f4 as fast as for 4-bit floats, which is twice as fast."""
    rates = rates_of(name)
    text = "\n".join(operands(name, mnemonic, rate) for mnemonic, rate in rates.matrix.items())
    command = [MCA, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={name}", "-iterations=1", "-instruction-info"]
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^ *\d+ +(\d+) +([\d.]+) .*?(v_mfma\w+)", answer, re.MULTILINE)
    assert len(rows) == len(rates.matrix)
    for latency, passes, mnemonic in rows:
        rate = rates.matrix[mnemonic]
        assert rate.narrow_cycles == 4 * float(passes), mnemonic
        assert rate.cycles == rate.narrow_cycles * (2 if mnemonic.endswith("f8f6f4") else 1), mnemonic
        assert rates.matrix_latency == 4 * (int(latency) - float(passes)), mnemonic


def test_other_archs_have_no_rates() -> None:
    assert {name: arch.load(name).rates for name in ("x86-64-v3", "sm_90a")} == {"x86-64-v3": None, "sm_90a": None}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"simds": 0}, "rates.simds"),
        ({"unknown": 1}, "rates.unknown"),
        ({"instructions": {"v_x": {"tile": [1, 2], "cycles": 4}}}, "rates.instructions.v_x.tile"),
        ({"instructions": {"v_x": {"tile": [1, 2, 3]}}}, "rates.instructions.v_x.cycles"),
        ({"vector": {"cycles": 4}}, "rates.vector.slow_cycles"),
    ],
)
def test_malformed_rates_name_the_field(change: dict[str, object], field: str) -> None:
    from tilewright_arch.loader import _files, _read_json

    document: Any = _read_json(_files()["gfx942"], "gfx942")
    document["rates"] |= change
    with pytest.raises(SpecError) as caught:
        arch.parse_spec(document, "own")
    assert field in str(caught.value)
