"""A new arch is a spec and nothing else: made-up ones get kernel sets, candidates and sources of convolutions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.kernel_sets.sets import KERNEL_SETS
from tilewright_grouped_conv.plugin import ConvOperation
from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.operands import strides_in
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import ConfigInvalidError
from tilewright_kit.types.tensor import TensorDesc

CONV = ConvOperation(Direction.FORWARD)
SPECS = Path(tilewright_arch.__file__).parent / "specs"


def made_up(tmp_path: Path, known: str, **words: str) -> ArchSpec:
    """A spec in which words are replaced by others."""
    text = (SPECS / f"{known}.json").read_text("utf-8")
    for word, other in words.items():
        assert f'"{word}"' in text
        text = text.replace(f'"{word}"', f'"{other}"')
    path = tmp_path / f"{json.loads(text)['name']}.json"
    path.write_text(text)
    tilewright_arch.validate_spec(path)
    return tilewright_arch.parse_spec(path)


def candidates(arch: ArchSpec) -> list[ConvConfig]:
    """Candidates of a dense layer of half precision, the selected one first."""
    x, w = (TensorDesc.of("fp16", shape, strides_in(Order.LAST, shape)) for shape in ((32, 64, 56, 56), (64, 64, 3, 3)))
    problem = CONV.parse(OperationRequest("conv", {"x": x, "w": w}, {}, {"padding": 1}))
    return list(CONV.candidates(problem, device_of(arch)))


@pytest.mark.parametrize(("known", "name"), [("sm_90a", "sm_97a"), ("gfx942", "cdna9"), ("x86-64-v3", "riscv64")])
def test_an_arch_of_any_name_gets_the_kernels_of_what_its_spec_offers(tmp_path: Path, known: str, name: str) -> None:
    arch, twin = tilewright_arch.load(known), made_up(tmp_path, known, **{known: name})
    for direction in Direction:
        for title in ("default", "essential", "profiler"):
            kernels = KERNEL_SETS[direction][title]
            assert list(kernels.iterate(twin, CONV.rules)) == list(kernels.iterate(arch, CONV.rules)), title
    assert candidates(twin) == candidates(arch) != []


def test_a_pipeline_of_an_instruction_that_no_template_issues_is_not_given_another_ones(tmp_path: Path) -> None:
    ours = candidates(tilewright_arch.load("sm_90a"))[0]
    arch = made_up(tmp_path, "sm_90a", wgmma="tcgen05", sm_90a="sm_100a")
    assert ours.pipeline == "ws" and "ws" in arch.pipelines
    found = candidates(arch)
    assert found and {config.pipeline for config in found} <= {"compv3", "compv4"}
    kernels = KERNEL_SETS[Direction.FORWARD]["default"].expand(arch, CONV.rules)
    assert kernels and all(config.pipeline != "ws" for config in kernels)
    assert "pipeline_template" in {item.rule for item in CONV.rules.check(ours, arch)}
    with pytest.raises(ConfigInvalidError):
        CONV.generate(ours, arch)
    assert CONV.rules.correct(ours, arch).is_valid
