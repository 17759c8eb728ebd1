"""Every kernel of the default set compiles for its GPU and is what it is to be: see ``shipped.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from shipped import ARCHS, Shipped

from tilewright_arch import ArchSpec
from tilewright_kit.tiles.footprint.workgroup import shared_bytes, threads_of
from tilewright_moe.codegen import generate
from tilewright_moe.config import RULES, MoeConfig
from tilewright_moe.kernel_sets import KERNEL_SETS


def has_matrix(config: MoeConfig, arch: ArchSpec) -> bool:
    """Waves of 32 lanes have no matrix instructions for fp32."""
    return config.a != "fp32" or arch.wave_size == 64


EXPERTS = Shipped(
    "moe",
    Path(__file__),
    {"moe_gemm": KERNEL_SETS},
    RULES,
    generate,
    threads_of,
    has_matrix,
    spills=lambda facts: facts.vgpr_spills or facts.scratch_bytes,
    shared=shared_bytes,
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ARCHS)
def test_every_kernel_of_the_shipped_set_compiles(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    EXPERTS.check(name, tmp_path, again=pytestconfig.getoption("--gates"))
