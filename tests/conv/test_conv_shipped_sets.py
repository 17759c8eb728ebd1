"""Every kernel of the default sets of convolution compiles for its GPU and is what it is to be: see ``shipped.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from shipped import ARCHS, Shipped

from tilewright_arch import ArchSpec
from tilewright_grouped_conv.codegen import generate
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.kernel_sets.sets import KERNEL_SETS
from tilewright_grouped_conv.launch.direct import loop_threads
from tilewright_grouped_conv.rules.rulebook import RULES


def has_matrix(config: ConvConfig, arch: ArchSpec) -> bool:
    """Waves of 32 lanes have no matrix instructions for fp32."""
    return config.is_matrix and (config.a != "fp32" or arch.wave_size == 64)


CONVOLUTION = Shipped(
    "conv",
    Path(__file__),
    KERNEL_SETS,
    RULES,
    generate,
    loop_threads,
    has_matrix,
    spills=lambda facts: facts.vgpr_spills or facts.sgpr_spills or facts.scratch_bytes,
    sample=6,
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ARCHS)
def test_every_kernel_of_the_shipped_sets_compiles(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    CONVOLUTION.check(name, tmp_path, again=pytestconfig.getoption("--gates"))
