"""Source units: every constant of a configuration stands in the structure that templates read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fmha_configs import AMD, ARCHS, CPU, NVIDIA, all_templates, valid

import tilewright_native
from tilewright_arch import ArchSpec
from tilewright_fmha.codegen import NATIVE_FAMILIES, generate, product_type, render
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.defaults import ELEMENTWISE
from tilewright_fmha.pipelines.sources import HEADERS
from tilewright_fmha.vocabulary import BiasKind, Family, FmhaDType, MaskKind, Mode, Rope, VLayout
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import ConfigInvalidError

INCLUDE = Path(tilewright_native.include_dir())


@pytest.fixture(autouse=True)
def _templates() -> Iterator[None]:
    with all_templates():
        yield


def _constants(text: str) -> dict[str, str]:
    """Names and values of the structure."""
    body = text[text.index("struct Config {") : text.index("};")]
    return dict(re.findall(r"(\w+) = ([^,;]+)[,;]", body))


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("family", list(Family))
def test_every_family_has_a_unit(arch: ArchSpec, family: Family) -> None:
    config = valid(arch, family)
    unit = generate(config, arch)
    header, macro = HEADERS[family]
    folder = "cpu" if arch.kind == "cpu" else "gpu"
    assert f'#include "tilewright/{folder}/fmha/{header}"' in unit.text
    assert unit.name == config.name and config.name in unit.text.splitlines()[0]
    assert "$" not in unit.text
    symbol = unit.entries["main"]
    if arch.kind == "cpu":
        scratch = family not in ELEMENTWISE
        assert f"{macro}({symbol}, Config)" in unit.text
        assert (f"TW_FMHA_WORKSPACE({symbol}, Config)" in unit.text) == scratch
        assert unit.entries.get("workspace") == (f"{symbol}_workspace" if scratch else None)
    else:
        assert re.search(rf"^TW_FMHA_\w*KERNEL\({symbol}, Config\)$", unit.text, re.MULTILINE)
    assert unit.language == {"cpu": "c++"}.get(arch.kind, arch.kind)


def test_constants_are_those_of_the_configuration() -> None:
    config = valid(
        AMD,
        dtype=FmhaDType.FP16,
        hdim=(192, 128),
        mode=Mode.GROUP,
        v_layout=VLayout.VC,
        mask=MaskKind.WINDOW,
        bias=BiasKind.ELEMENTWISE,
        sink=True,
        skip_min_seqlen_q=True,
        softcap=True,
    )
    found = _constants(generate(config, AMD).text)
    names = ("m0", "n0", "k0", "n1", "k1", "k0max")
    assert [int(found[name]) for name in names] == list(config.tile)
    assert [int(found[f"wave_{axis}{stage}"]) for stage in range(3) for axis in "mnk"] == list(config.wave)
    assert [int(found[f"warp_{axis}{stage}"]) for stage in range(3) for axis in "mnk"] == list(config.warp_tile)
    assert (found["hdim_q"], found["hdim_v"]) == ("192", "128")
    assert (found["mask"], found["bias"]) == ("tw::FmhaMask::window", "tw::FmhaBias::elementwise")
    assert all(found[name] == "true" for name in ("varlen", "v_col", "token_sinks", "skip_min", "softcap"))
    assert all(found[name] == "false" for name in ("dropout", "paged", "lse", "learned_sinks"))
    nine = _constants(generate(valid(NVIDIA, Family.DQ_DK_DV), NVIDIA).text)
    assert [int(nine[f"tile_{index}"]) for index in (6, 7, 8)] == list(valid(NVIDIA, Family.DQ_DK_DV).tile[6:])


@pytest.mark.parametrize(
    "changes",
    [
        {"lse": True},
        {"mask": MaskKind.CAUSAL},
        {"dropout": True},
        {"learned_sinks": True},
        {"mode": Mode.GROUP},
        {"dtype": FmhaDType.FP16},
        {"bias": BiasKind.ALIBI},
        {"hdim": (128, 128)},
    ],
)
def test_another_kernel_has_another_structure(changes: dict[str, Any]) -> None:
    one, other = (generate(valid(CPU, **fields), CPU).text for fields in ({}, changes))
    body = [text[text.index("struct Config") : text.index("};")] for text in (one, other)]
    assert body[0] != body[1]


def test_words_are_those_of_the_native_side() -> None:
    options = (INCLUDE / "tilewright" / "core" / "options.hpp").read_text()

    def members(name: str) -> set[str]:
        found = re.search(rf"enum class {name} \{{([^}}]*)\}}", options)
        assert found is not None, name
        return {word.strip() for word in found[1].split(",")}

    assert members("FmhaFamily") == set(NATIVE_FAMILIES.values())
    assert members("FmhaMask") == {item.value for item in MaskKind}
    assert members("FmhaBias") == {item.value for item in BiasKind}
    assert members("FmhaRope") == {item.value for item in Rope}
    pipelines = {name for arch in ARCHS.values() if attention_of(arch) for name in attention_of(arch).pipelines}
    assert pipelines <= members("FmhaPipeline")


def test_probabilities_are_rounded_where_dot_products_are_pairs() -> None:
    assert product_type(valid(CPU, dtype=FmhaDType.BF16), "cpu") is DType.BF16
    assert product_type(valid(CPU, dtype=FmhaDType.FP8BF16), "cpu") is DType.BF16
    assert product_type(valid(CPU, dtype=FmhaDType.FP16), "cpu") is DType.FP32
    assert product_type(valid(CPU, dtype=FmhaDType.BF16FP8), "cpu") is DType.BF16
    assert product_type(valid(CPU, dtype=FmhaDType.FP16FP8), "cpu") is DType.FP32
    assert product_type(valid(AMD, dtype=FmhaDType.FP16), "hip") is DType.FP16


def test_an_invalid_kernel_has_no_unit() -> None:
    broken = valid(CPU).replace(tile=(1, 2, 3, 4, 5, 6))
    with pytest.raises(ConfigInvalidError) as error:
        generate(broken, CPU)
    assert error.value.rule == "cpu_defaults" and error.value.fix
    assert "struct Config" in render(broken).text
