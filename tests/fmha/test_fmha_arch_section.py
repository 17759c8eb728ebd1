"""What archs offer to attention: blocks that are whole, and mistakes in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch as arch
from tilewright_arch.reading import Fields
from tilewright_fmha.config.arch_section import AttentionSpec, attention_of, read_attention

MINIMAL: dict[str, Any] = {
    "dtypes": ["fp16"],
    "pipelines": ["qr"],
    "hdims": {"fp16": [64, [128, 96]]},
    "combine_columns": 32,
    "page_sizes": [16],
    "kv_layouts": ["linear"],
    "kv_lookups": ["vllm"],
}


def _read(**changes: Any) -> AttentionSpec:
    record = {name: value for name, value in {**MINIMAL, **changes}.items() if value is not None}
    return read_attention(Fields(record, "test.json", "attention"))


@pytest.mark.parametrize("name", arch.names())
def test_every_arch_has_attention(name: str) -> None:
    spec = attention_of(arch.load(name))
    assert spec is not None and {"fp32", "fp16", "bf16"} <= set(spec.dtypes)
    assert {"qr", "appendkv", "bwd", "splitkv_combine"} <= set(spec.pipelines)
    for dtype in ("fp16", "bf16"):
        assert spec.hdim_for(dtype, 256, 256) == (256, 256) and spec.hdim_for(dtype, 264, 8) is None
    for pairs in spec.hdims.values():
        assert all(8 <= size <= 256 and size % 8 == 0 for pair in pairs for size in pair)
    for pair in {"x".join(map(str, pair)) for pairs in spec.hdims.values() for pair in pairs} if spec.tiles else ():
        assert pair in spec.tiles and pair in spec.backward_tiles
    assert hash(spec) == hash(attention_of(arch.load(name)))


def test_only_some_archs_have_direct_copies_and_transposing_reads() -> None:
    offers = {name: attention_of(arch.load(name)) for name in arch.names()}
    assert [name for name, spec in offers.items() if spec and spec.trload] == ["gfx950"]
    assert [name for name, spec in offers.items() if spec and "ws" in spec.pipelines] == ["sm_90a"]
    limits = {name: spec.async_lds_bytes for name, spec in offers.items() if spec and spec.async_lds_bytes}
    assert limits == {name: arch.load(name).lds_bytes for name in limits} and set(limits) == {
        "gfx90a", "gfx942", "gfx950", "sm_80", "sm_90a",
    }  # fmt: skip


def test_sizes_of_heads_are_rounded_up_to_the_smallest_that_holds_both() -> None:
    spec = _read(hdims={"fp16": [64, [128, 96], 128, 256]})
    assert spec.hdim_for("fp16", 40, 64) == (64, 64)
    assert spec.hdim_for("fp16", 72, 90) == (128, 96)
    assert spec.hdim_for("fp16", 72, 100) == (128, 128)
    assert spec.hdim_for("fp16", 72, 90, columns=64) == (128, 128)
    assert spec.hdim_for("bf16", 8, 8) is None


def test_heads_may_be_all_pairs_or_shared() -> None:
    spec = _read(dtypes=["fp16", "bf16"], hdims={"fp16": {"each": [32, 64]}, "bf16": "fp16"})
    assert spec.hdims["bf16"] == ((32, 32), (32, 64), (64, 32), (64, 64)) == spec.hdims["fp16"]


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"dtypes": None}, "attention.dtypes", "is missing"),
        ({"dtypes": ["fp16", "bf16"]}, "attention.hdims.bf16", "is missing"),
        ({"hdims": {"fp16": [64], "fp8": [64]}}, "attention.hdims.fp8", "is not among the dtypes"),
        ({"hdims": {"fp16": "bf16"}}, "attention.hdims.fp16", "no earlier entry"),
        ({"hdims": {"fp16": [[1, 2, 3]]}}, "attention.hdims.fp16[0]", "must be a size"),
        ({"hdims": {"fp16": []}}, "attention.hdims.fp16", "at least 1"),
        ({"hdims": {"fp16": [0]}}, "attention.hdims.fp16[0]", "at least 1"),
        ({"tiles": {"64x64": [[64, 64]]}}, "attention.tiles.64x64[0]", "6 positive"),
        ({"backward_tiles": {"64x64": [[64] * 6]}}, "attention.backward_tiles.64x64[0]", "9 positive"),
        ({"warp_tiles": {"fp16": "bf16"}}, "attention.warp_tiles.fp16", "no earlier entry"),
        ({"colour": "red"}, "attention.colour", "is not a known field"),
        ({"sweep": {"m1": [64]}}, "attention.sweep.m1", "is not a known field"),
        ({"forms": {"64": {"m0": [64]}}}, "attention.forms.64", "192x128, and not *"),
        ({"forms": {"*": {"n1": [64]}}}, "attention.forms.*.n1", "is not a known field"),
        ({"tiles": {"64": [[64] * 6]}}, "attention.tiles.64", "no pair of sizes of heads"),
    ],
)
def test_mistakes_name_the_field(changes: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(arch.SpecError) as error:
        _read(**changes)
    assert field in str(error.value) and problem in str(error.value)


def test_a_mistake_is_named_when_the_section_is_first_used() -> None:
    document = json.loads((Path(arch.__file__).parent / "specs" / "sm_80.json").read_text("utf-8"))
    spec = arch.parse_spec(document | {"operations": {"attention": {"sweep": {"m0": ["many"]}}}}, "made_up.json")
    with pytest.raises(arch.SpecError, match=r"operations\.attention\.sweep\.m0\[0\]"):
        attention_of(spec)


def test_sections_of_fragments_and_of_the_spec_are_merged_entry_by_entry() -> None:
    record = arch.load("sm_90a").operations["attention"]
    document = json.loads((Path(arch.__file__).parent / "specs" / "sm_90a.json").read_text("utf-8"))
    own = document["operations"]["attention"]
    assert isinstance(record, arch.FrozenMap) and "kv_layouts" in record and "kv_layouts" not in own
    assert set(own) < set(record)
