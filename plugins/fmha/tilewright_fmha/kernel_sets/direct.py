"""Default kernels of the loops for the matrix units of gfx942 and gfx950."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_fmha.config.config import CONFIGS, FmhaConfig
from tilewright_fmha.config.pipelines import DIRECT, direct_algorithm
from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, Family, FmhaDType, MaskKind, Mode
from tilewright_kit.kernel_sets.declare import Declaration, DeferredDeclarations, declare

__all__ = ["DIRECT_DEFAULTS"]

_TYPES = [FmhaDType.FP16, FmhaDType.BF16]
_MASKS = [MaskKind.NONE, MaskKind.CAUSAL]
_HEADS = ((64, 64), (128, 128))


def _kernels() -> Iterator[Declaration[FmhaConfig]]:
    forward, backward = CONFIGS[ATTENTION], CONFIGS[ATTENTION_BACKWARD]
    for hdim in _HEADS:
        own = {"pipeline": DIRECT, "hdim": hdim, **direct_algorithm(Family.FWD, hdim)}
        yield declare(forward, **own, dtype=_TYPES, mask=_MASKS, lse=[False, True])
        yield declare(forward, **own, dtype=FmhaDType.BF16, mask=_MASKS, mode=Mode.GROUP)
    family, hdim = Family.DQ_DK_DV, _HEADS[-1]
    own = {"pipeline": DIRECT, "family": family, "hdim": hdim, **direct_algorithm(family, hdim)}
    yield declare(backward, **own, dtype=_TYPES, mask=[*_MASKS, MaskKind.WINDOW], deterministic=[False, True])
    yield declare(backward, **own, dtype=FmhaDType.BF16, mask=_MASKS, mode=Mode.GROUP, deterministic=True)


DIRECT_DEFAULTS = DeferredDeclarations(_kernels)
