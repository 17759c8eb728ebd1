"""A malformed spec is refused by the schema and by the loader, and both name the field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch as arch
from tilewright_arch.loader import resolve

SPECS = Path(arch.__file__).parent / "specs"
Document = dict[str, Any]


def document(name: str) -> Document:
    resolved, _ = resolve(SPECS / f"{name}.json")
    return copy.deepcopy(resolved)


def put(*path: str | int, value: object) -> Callable[[Document], None]:
    def change(spec: Document) -> None:
        target: Any = spec
        for part in path[:-1]:
            target = target[part]
        target[path[-1]] = value

    return change


def drop(*path: str) -> Callable[[Document], None]:
    def change(spec: Document) -> None:
        target: Any = spec
        for part in path[:-1]:
            target = target[part]
        del target[path[-1]]

    return change


BROKEN = {
    "missing wave size": ("gfx942", drop("wave_size"), "wave_size"),
    "text for a number": ("gfx942", put("wave_size", value="64"), "wave_size"),
    "true for a number": ("gfx942", put("max_vgprs", value=True), "max_vgprs"),
    "negative cache": ("gfx942", put("caches", "l2_bytes", value=-1), "l2_bytes"),
    "missing cache": ("gfx942", drop("caches", "l1_bytes"), "l1_bytes"),
    "unknown field": ("gfx942", put("warp_size", value=64), "warp_size"),
    "unknown cache field": ("gfx942", put("caches", "l4_bytes", value=1), "l4_bytes"),
    "unknown kind": ("gfx942", put("kind", value="rocm"), "kind"),
    "other schema version": ("gfx942", put("schema_version", value=2), "schema_version"),
    "wave of two": ("gfx942", put("waves", 1, value=[1, 2]), "waves"),
    "wave of zero": ("gfx942", put("waves", 0, value=[1, 0, 1]), "waves"),
    "no waves": ("gfx942", put("waves", value=[]), "waves"),
    "wave rule of zero": ("x86-64-v3", put("waves", value={"teams": [0]}), "waves"),
    "no LDS on a GPU": ("gfx942", drop("lds_bytes"), "lds_bytes"),
    "LDS bytes on a CPU": ("x86-64-v3", put("lds_bytes", value=1), "lds_bytes"),
    "no L2 share on a CPU": ("x86-64-v3", drop("lds_l2_fraction"), "lds_l2_fraction"),
    "L2 share above one": ("x86-64-v3", put("lds_l2_fraction", value=1.5), "lds_l2_fraction"),
    "unknown fp8 encoding": ("gfx942", put("fp8_encoding", value="ieee"), "fp8_encoding"),
    "bad dtype key": ("gfx942", put("warp_tiles", "half_half_fp32", value=[]), "half_half_fp32"),
    "empty warp tiles": ("gfx942", put("warp_tiles", value={}), "warp_tiles"),
    "tile of two": (
        "gfx942",
        put("warp_tiles", "int8_int8_int32", value=[{"tiles": [[16, 16]], "instruction": "mfma"}]),
        "int8_int8_int32",
    ),
    "tile without instruction": (
        "gfx942",
        put("warp_tiles", "int8_int8_int32", value=[{"tiles": [[16, 16, 32]]}]),
        "int8_int8_int32",
    ),
    "fraction of zero": ("gfx942", put("pipelines", "compv4", "lds_fraction", value=0), "lds_fraction"),
    "fraction as text": ("gfx942", put("pipelines", "compv4", "lds_fraction", value="1/2"), "lds_fraction"),
    "one number of stages": ("sm_90a", put("pipelines", "ws", "stages", value=[4]), "stages"),
    "no clusters": ("sm_90a", put("pipelines", "ws", "clusters", value=[]), "clusters"),
    "registers of no consumer": (
        "sm_90a",
        put("pipelines", "ws", "register_splits", 0, "consumers", value=0),
        "consumers",
    ),
    "copies of nothing": ("sm_90a", put("bulk_copy", "max_box", value=0), "max_box"),
    "no schedulers": ("gfx942", put("pipelines", "mem", "schedulers", value=[]), "schedulers"),
    "repeated epilogue": ("gfx942", put("pipelines", "mem", "epilogues", value=["default"] * 2), "epilogues"),
    "buffering as number": ("gfx942", put("pipelines", "mem", "double_buffer", value=1), "double_buffer"),
    "no pipelines": ("gfx942", put("pipelines", value={}), "pipelines"),
    "rate of unknown dtype": (
        "gfx942",
        put("throughput", "flops_per_cycle_per_unit", "tf32", value=1),
        "tf32",
    ),
    "fractional clock": ("gfx942", put("throughput", "clock_mhz", value=2100.5), "clock_mhz"),
    "no flags": ("gfx942", put("toolchain", "flags", value=[]), "flags"),
    "no HIP names": ("gfx942", put("match", value={}), "gcn_arch_names"),
    "no CUDA capability": ("sm_80", drop("match", "compute_capability"), "compute_capability"),
    "short CUDA capability": ("sm_80", put("match", "compute_capability", value=[8]), "compute_capability"),
    "no CPU flags": ("x86-64-v4", drop("match", "cpu_flags"), "cpu_flags"),
    "feature without proof": ("x86-64-v4", drop("optional_features", "vnni", "cpu_flags"), "cpu_flags"),
    "operation as a list": ("gfx942", put("operations", value={"fmha": []}), "fmha"),
    "operations as a list": ("gfx942", put("operations", value=[]), "operations"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_schema_and_loader_refuse_and_name_the_field(case: str) -> None:
    name, change, field = BROKEN[case]
    spec = document(name)
    change(spec)
    with pytest.raises(arch.SpecError) as by_loader:
        arch.parse_spec(spec)
    assert field in by_loader.value.field
    assert str(by_loader.value).startswith(name)
    with pytest.raises(arch.SpecError) as by_schema:
        arch.validate_spec(spec)
    assert field in str(by_schema.value)


INCONSISTENT = {
    "undefined instruction in a tile": (
        put("warp_tiles", "int8_int8_int32", value=[{"tiles": [[16, 16, 32]], "instruction": "wmma"}]),
        "warp_tiles.int8_int8_int32[0].instruction",
    ),
    "undefined set": (
        put("warp_tiles", "int8_int8_int32", value=[{"set": "zmm", "k": [1], "instruction": "mfma"}]),
        "warp_tiles.int8_int8_int32[0].set",
    ),
    "alias of a missing key": (
        put("warp_tiles", "bf16_bf16_fp32", value="fp16_fp16_int32"),
        "warp_tiles.bf16_bf16_fp32",
    ),
    "tile listed twice": (
        put("warp_tiles", "int8_int8_int32", value=[{"tiles": [[16, 16, 32]], "instruction": "mfma"}] * 2),
        "warp_tiles.int8_int8_int32[1]",
    ),
    "two accumulators for a pair": (
        put("warp_tiles", "int8_int8_fp32", value="int8_int8_int32"),
        "warp_tiles.int8_int8_int32",
    ),
    "undefined instruction in a pipeline": (
        put("pipelines", "mem", "instructions", value=["wgmma"]),
        "pipelines.mem.instructions",
    ),
    "stages the wrong way round": (put("pipelines", "mem", "stages", value=[4, 2]), "pipelines.mem.stages"),
    "no kernel without a cluster": (put("pipelines", "mem", "clusters", value=[[2, 1, 1]]), "pipelines.mem.clusters"),
    "registers for as many consumers twice": (
        put("pipelines", "mem", "register_splits", value=[{"consumers": 1, "producer": 8, "consumer": 8}] * 2),
        "pipelines.mem.register_splits[1].consumers",
    ),
    "preshuffle pipeline that is none": (put("preshuffle_pipelines", value=["v9"]), "preshuffle_pipelines[0]"),
    "trait of an unknown pipeline": (
        put(
            "unsupported_traits",
            value=[{"pipeline": "v9", "epilogue": "default", "scheduler": "intrawave", "reason": "x"}],
        ),
        "unsupported_traits[0].pipeline",
    ),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_the_loader_refuses_what_a_schema_cannot_see(case: str) -> None:
    change, field = INCONSISTENT[case]
    spec = document("gfx942")
    change(spec)
    with pytest.raises(arch.SpecError) as caught:
        arch.parse_spec(spec)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["warp_tiles", "flops_per_cycle_per_unit"])
def test_two_features_must_not_change_the_same_entry(field: str) -> None:
    spec = document("x86-64-v4")
    vnni = spec["optional_features"]["vnni"]
    spec["optional_features"]["amx"] = {
        "description": "matrix tiles",
        "cpu_flags": ["amx_int8"],
        field: vnni[field],
    }
    with pytest.raises(arch.SpecError, match="also changed by vnni") as caught:
        arch.parse_spec(spec)
    assert caught.value.field == f"optional_features.amx.{field}"


def test_a_stated_trait_is_refused_with_its_reason() -> None:
    spec = document("gfx942")
    spec["unsupported_traits"] = [
        {"pipeline": "compv3", "epilogue": "cshuffle", "scheduler": "intrawave", "reason": "LDS is in use"}
    ]
    loaded = arch.parse_spec(spec)
    assert loaded.trait_refusal("compv3", "cshuffle", "intrawave") == "LDS is in use"
    assert loaded.supports_trait("compv3", "default", "intrawave")


def test_later_sections_and_notes_do_not_break_the_loader() -> None:
    spec = document("gfx942")
    spec["operations"] = {"fmha": {"pipelines": ["qr"], "limits": {"head_dim": 256}}}
    spec["x-later"] = [1, 2]
    arch.validate_spec(spec)
    loaded = arch.parse_spec(spec)
    assert loaded.operations["fmha"] == {"pipelines": ("qr",), "limits": {"head_dim": 256}}
    assert hash(loaded) != hash(arch.load("gfx942"))
    assert json.loads(json.dumps(loaded.to_dict()))["operations"]["fmha"]["pipelines"] == ["qr"]


def test_a_fragment_that_is_not_there_is_named() -> None:
    with pytest.raises(arch.SpecError, match="no fragment 'hop'") as caught:
        arch.parse_spec({"name": "gfx1", "include": ["hop"]})
    assert caught.value.field == "include"


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gfx1.json"
    path.write_text("{")
    with pytest.raises(arch.SpecError, match=r"gfx1\.json: document: is not JSON"):
        arch.parse_spec(path)


def test_to_dict_is_plain_json_with_the_id_first() -> None:
    shown = arch.load("x86-64-v4+vnni").to_dict()
    assert next(iter(shown)) == "id"
    assert json.loads(json.dumps(shown))["id"] == "x86-64-v4+vnni"
