"""Every kernel of the default sets of attention compiles for its GPU and is what it is to be: see ``shipped.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from shipped import ARCHS, Shipped

from tilewright_arch import ArchSpec
from tilewright_fmha.codegen import generate
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.defaults import ELEMENTWISE
from tilewright_fmha.footprint.gpu import shared_bytes
from tilewright_fmha.footprint.tile_products import threads_of
from tilewright_fmha.pipelines.kernel_sets import KERNEL_SETS
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_server.build.toolchains.hip import scratch_in_use

ROW_THREADS = 128
"""Of workgroups without a product of matrices."""


def threads(config: FmhaConfig, arch: ArchSpec) -> int:
    return ROW_THREADS if config.family in ELEMENTWISE else threads_of(config, arch)


def has_matrix(config: FmhaConfig, arch: ArchSpec) -> bool:
    """Waves of 32 lanes have no matrix instructions for fp32."""
    return config.family not in ELEMENTWISE and (config.q.bytes < 4 or arch.wave_size == 64)


ATTENTION = Shipped(
    "fmha",
    Path(__file__),
    KERNEL_SETS,
    RULES,
    generate,
    threads,
    has_matrix,
    # Scalar registers may lie in lanes of vector registers.
    spills=lambda facts: facts.vgpr_spills or scratch_in_use(facts),
    shared=shared_bytes,
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ARCHS)
def test_every_kernel_of_the_shipped_sets_compiles(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    ATTENTION.check(name, tmp_path, again=pytestconfig.getoption("--gates"))
