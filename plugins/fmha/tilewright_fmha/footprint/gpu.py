"""Shared memory and registers of GPU kernels: the Python mirror of what the templates declare."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_arch import ArchSpec
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.config.decode import decode_bytes, decode_resident, decodes, splits_tiles
from tilewright_fmha.config.defaults import ELEMENTWISE
from tilewright_fmha.config.gradients import specialised_gradient, specialised_gradient_bytes
from tilewright_fmha.config.latent import is_latent, latent_bytes
from tilewright_fmha.config.pipelines import DIRECT, FEW_ROWS, direct_bytes
from tilewright_fmha.footprint.backward_partition import gradient_bytes, gradient_registers
from tilewright_fmha.footprint.tile_products import products_of, threads_of, wave_threads
from tilewright_fmha.vocabulary import BiasKind, Family, KvLayout, MaskKind, QScale, VLayout

__all__ = ["registers_estimate", "resident", "shared_bytes"]

_CUDA_REGISTERS = -6
"""Measured: 128 x 64 scores of heads of 128 by four waves fit into 254 registers, and causal ones do not; nor do
those of 128 x 128 and heads of 64, of which plain ones take 252.
"""

_THREADS = 128
"""Threads of workgroups without a product of matrices."""

_SCORES_BYTES = (16 + 64) * 33 * 4
"""``FmhaScores::shared_bytes`` of ``tilewright/gpu/fmha/scores.hpp``: queries and keys, 32 elements of each."""

_OTHER_REGISTERS = 64
"""Addresses, maxima and sums, fragments that are on their way."""

_ON_THEIR_WAY = 96 << 10
"""Bytes of keys and values that a workgroup asks for ahead."""

_MOST_RESIDENT = 8

_MORE_ROWS = 100
"""RDNA: beside results, of every row of matrix instructions of a wave beyond the first (measured: fewer spill)."""


def shared_bytes(config: FmhaConfig, arch: ArchSpec) -> int:
    """Bytes of shared memory of a workgroup."""
    if is_latent(config):
        return latent_bytes(config, arch)
    if decodes(config):
        return decode_bytes(config, arch)
    if specialised_gradient(config):
        return specialised_gradient_bytes(config)
    if config.family in ELEMENTWISE:
        if config.family is Family.SCORES:
            return _SCORES_BYTES
        # A row of results from each group of threads that has 8 columns each.
        return _THREADS // (config.hdim[1] // 8) * config.hdim[1] * 4 if config.family is Family.COMBINE else 0
    element = max(config.q.bytes, 2)  # 8-bit floats are widened on their way
    q, v = config.hdim

    if config.pipeline == DIRECT:
        return direct_bytes(config)
    if config.family is Family.DQ_DK_DV:
        return gradient_bytes(config, arch)
    words = int(config.paged) + 2 * int(config.qscale in (QScale.BLOCKSCALE, QScale.KV_BLOCKSCALE))
    if config.pipeline == FEW_ROWS and arch.kind == "cuda":
        return config.m0 * q * element + _rings(config, element, words)
    keys, values = (config.n0 * length * element for length in (q, v))
    both = config.pipeline == "qr_async"
    # Probabilities lie in registers as mma.sync takes them; other atoms read them from shared memory.
    through = 0 if arch.kind == "cuda" and element == 2 else config.m0 * config.n0 * element
    looked_up = (2 if both else 1) * words * config.n0 * 4
    return config.m0 * q * element + (keys + values if both else max(keys, values)) + through + looked_up


def _rings(config: FmhaConfig, element: int, words: int) -> int:
    """Shared memory of the waves that share keys: slots for blocks on their way, and a tile for what is widened
    there (FmhaRing)."""
    q, v = config.hdim
    block = config.n0 * (q + v) * config.kv.bytes
    slots = min(max(_ON_THEIR_WAY // block, 2), 4)
    wide = config.n0 * v * element if config.kv.bytes < element and _along_keys(config) else 0
    return slots * (block + words * config.n0 * 4) + wide


def registers_estimate(config: FmhaConfig, arch: ArchSpec) -> int:
    """Registers of a thread, about: results of products that live side by side."""
    if config.family in ELEMENTWISE:
        return _OTHER_REGISTERS
    threads = wave_threads(config, arch)
    products = {item.name: item.accumulators // threads for item in products_of(config)}
    if config.family is Family.DQ_DK_DV:
        return gradient_registers(config, arch)
    held = products["scores"] + products["values"] + _OTHER_REGISTERS
    if arch.kind == "cuda" and config.q.bytes < 4:
        held += _CUDA_REGISTERS + products["scores"] // 32
        held += sum(more for feature, more in _features(config) if feature)
    if arch.kind == "hip" and arch.wave_size == 32 and config.q.bytes < 4:
        held += _MORE_ROWS * (config.m0 // max(config.wave[0] * config.warp_tile[0], 1) - 1)
    return held


def _features(config: FmhaConfig) -> Iterator[tuple[bool, int]]:
    """Registers that features of scores add to a thread's registers on CUDA devices, about."""
    yield config.softcap or config.bias is not BiasKind.NONE, 16
    yield config.dropout, 24 if config.m0 <= 16 * config.wave[0] else 130  # random words of all rows are made at once
    yield config.mask is MaskKind.CAUSAL, 4
    yield config.qscale in (QScale.BLOCKSCALE, QScale.KV_BLOCKSCALE), 20
    yield config.mask is MaskKind.WINDOW, 8
    if config.pipeline != FEW_ROWS:
        yield config.pack_gqa, 8
        # Measured: heads of 256 and blocks of 64 leave nothing for both bounds of a window and where pages lie; of 8
        # bits, where sequences of queries differ in length, without a mask either.
        eight = config.kv.bytes == 1
        lost = config.varlen and max(config.hdim) > 192 if eight else config.mask is MaskKind.WINDOW
        yield config.paged and config.n0 > 32 and lost, 40 if eight else 32
        return
    # Fragments of values of whole heads; values whose chunks run along keys are read another way.
    yield _along_keys(config), 26
    yield True, min(config.hdim[1] * 3 // 16 + 2, 36)


def _along_keys(config: FmhaConfig) -> bool:
    """Chunks of values run along keys."""
    return config.v_layout is VLayout.VC or config.kv_layout is KvLayout.VECTORIZED


def resident(config: FmhaConfig, arch: ArchSpec) -> int:
    """Workgroups that share a unit, by shared memory and registers."""
    if decodes(config):
        return 1 if is_latent(config) else decode_resident(config)
    if specialised_gradient(config) or splits_tiles(config):
        return 1
    threads = threads_of(config, arch)
    most = _MOST_RESIDENT
    if needed := shared_bytes(config, arch):
        most = min(most, arch.lds_bytes // needed)
    if arch.register_file and (registers := registers_estimate(config, arch)):
        most = min(most, arch.register_file // (registers * threads))
    return max(most, 1)
