"""The wide space of attention kernels, for oracles and learned models (``contract.abilities.Searchable``)."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_arch import ArchSpec
from tilewright_fmha.candidates.applicability import families_of
from tilewright_fmha.candidates.wide import MOST_SPLITS_LOG2, wide_algorithms
from tilewright_fmha.config.config import FmhaConfig, config_of
from tilewright_fmha.config.pipelines import FEW_ROWS, SPECIALISED, offers_specialised
from tilewright_fmha.pipelines.algorithms import valid_algorithms
from tilewright_fmha.pipelines.candidates import predict_fmha, signature_fields
from tilewright_fmha.pipelines.records import record_of
from tilewright_fmha.pipelines.rulebook import RULES
from tilewright_fmha.pipelines.templates import TEMPLATES
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.problem.signature import signature_of
from tilewright_fmha.vocabulary import BiasKind, Family, MaskKind, QScale, Scheduling
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.selection.tabled import FieldTable, as_features, rows_of_table

__all__ = ["FmhaSearch"]

Table = Mapping[str, npt.NDArray[Any]]

_FAMILIES = (Family.FWD, Family.PAGEDKV, Family.BATCH_PREFILL, Family.SPLITKV, Family.DQ_DK_DV)
_PORTABLE = ("qr_async", "qr", "qr_pagedkv", FEW_ROWS, "bwd")
_TABLE = FieldTable(
    family=_FAMILIES, hdim=2, pipeline=(SPECIALISED, *_PORTABLE), tile=9, wave=9, warp_tile=9, stages=0,
    scheduler=tuple(Scheduling), pack_gqa=0, persistent=0, deterministic=0, max_splits_log2=0, use_trload=0,
    block_per_cu=0,
)  # fmt: skip
_SEEN = ("family", "hdim.0", "hdim.1", "pipeline", "tile.0", "tile.1", "wave.0", "wave.1", "stages", "scheduler",
         "pack_gqa", "deterministic", "warp_tile.0")  # fmt: skip
"""Columns that models see."""
_NUMBERS = (
    "batch", "heads_q", "heads_k", "group", "seq_q", "seq_k", "hdim_q", "hdim_v", "bytes_kv", "masked", "window",
    "varlen", "paged", "steps", "pairs", "work", "moved",
)  # fmt: skip
_PARTS = ("log_seconds", "compute", "memory", "log_tiles", "rounds", "fill", "use_q", "use_k")


def _is_plain(problem: FmhaProblem) -> bool:
    """Problems whose kernels the wide space holds: of 16 bits, without steps that specialised kernels lack."""
    return (
        not problem.is_empty
        and problem.dtype.q.bytes == 2
        and problem.qscale is QScale.NONE
        and problem.bias is BiasKind.NONE
        and not problem.has_dropout
        and not problem.odd_values
        and problem.shared is None
        and not problem.num_splits
    )


def _is_bare(problem: FmhaProblem) -> bool:
    """Without features that kernels of their own have, but for a causal mask."""
    signature = signature_of(problem)
    asked = any(signature[name] for name in ("lse", "softcap", "sink", "learned_sinks", "skip_min_seqlen_q"))
    lengths = problem.varlen or problem.has("seqlens_q") or problem.has("seqlens_k")
    return not asked and not lengths and problem.mask.kind in (MaskKind.NONE, MaskKind.CAUSAL)


class FmhaSearch:
    """The abilities of the operations as a mix-in."""

    feature_names: Sequence[str] = (*_NUMBERS, *_SEEN, *_PARTS)

    def search_class(self, problem: FmhaProblem, device: DeviceInfo) -> str:
        """Name of the class whose space serves the problem: halves share one. Empty if there is none."""
        if device.arch.kind != "cuda" or not offers_specialised(device.arch) or not _is_plain(problem):
            return ""
        if problem.family not in _FAMILIES:
            return ""
        heads = signature_fields(problem, problem.family, device)["hdim"]
        kept = "" if problem.dtype.kv.bytes == problem.dtype.q.bytes else f"-{problem.dtype.kv}"
        more = "-paged" if problem.paging is not None else ""
        more += "" if _is_bare(problem) else "-featured"
        return f"{problem.family.value}-half{kept}-{'x'.join(map(str, heads))}{more}"

    def search_space(self, problem: FmhaProblem, device: DeviceInfo) -> Sequence[FmhaConfig]:
        """Every valid kernel for the problem's kind, with its signature."""
        found = dict.fromkeys(_wide(problem, device))
        return [item for item in found if _TABLE.holds(item) and RULES.allows(item, device.arch)]

    def search_has(self, config: FmhaConfig, device: DeviceInfo) -> bool:  # noqa: ARG002
        """True for kernels whose traits the table has."""
        return _TABLE.holds(config)

    def search_table(self, configs: Sequence[FmhaConfig], device: DeviceInfo) -> Table:  # noqa: ARG002
        """Fields of kernels as arrays."""
        return _TABLE.columns(configs)

    def search_times(self, problem: FmhaProblem, table: Table, device: DeviceInfo) -> npt.NDArray[np.float64]:
        """Analytical seconds; infinite for kernels most of whose tiles would lie outside the problem."""
        found = np.full(rows_of_table(table), math.inf)
        rows = problem.seq_q * (problem.group if problem.family is not Family.DQ_DK_DV else 1)
        hopeless = (table["tile.0"] >= 2.0 * max(rows, 64)) | (table["tile.1"] >= 2.0 * max(problem.seq_k, 64))
        chosen = np.flatnonzero(~hopeless)
        predictions = _predicted(problem, {name: column[chosen] for name, column in table.items()}, device)
        found[chosen] = [item.seconds for item in predictions]
        return found

    def search_features(self, problem: FmhaProblem, table: Table, device: DeviceInfo) -> npt.NDArray[np.float32]:
        """Features of kernels on the problem, one row each, in the order of ``feature_names``."""
        predictions = _predicted(problem, table, device)
        seconds = np.array([item.seconds for item in predictions])
        of = {name: np.array([item.parts.get(name, 0.0) for item in predictions]) / seconds
              for name in ("compute", "memory")}  # fmt: skip
        packed = table["pack_gqa"] > 0
        rows = np.where(packed, problem.seq_q * problem.group, problem.seq_q)
        heads = problem.batch * np.where(packed, problem.heads_k, problem.heads_q)
        along = np.where(table["family"] == _FAMILIES.index(Family.DQ_DK_DV), 1, 0)
        cut = np.where(along > 0, np.ceil(problem.seq_k / table["tile.1"]), np.ceil(rows / table["tile.0"]))
        tiles = np.maximum(heads * cut, 1.0)
        rounds = tiles / max(device.units, 1)
        parts = {
            "log_seconds": np.log2(seconds), **of, "log_tiles": np.log2(tiles), "rounds": rounds,
            "fill": rounds / np.ceil(rounds),
            "use_q": rows / (np.maximum(np.ceil(rows / table["tile.0"]), 1) * table["tile.0"]),
            "use_k": problem.seq_k / (np.maximum(np.ceil(problem.seq_k / table["tile.1"]), 1) * table["tile.1"]),
        }  # fmt: skip
        assert tuple(parts) == _PARTS
        return as_features(_numbers(problem), table, _SEEN, parts)

    def search_config(self, problem: FmhaProblem, table: Table, row: int, device: DeviceInfo) -> FmhaConfig:  # noqa: ARG002
        """The kernel of a row, with the problem's signature. It may break a rule: rules are asked afterwards."""
        return _config(_signature(problem), tuple(float(table[name][row]) for name in _TABLE.names))


def _signature(problem: FmhaProblem) -> tuple[tuple[str, Any], ...]:
    return tuple(signature_of(problem).items())


@lru_cache(maxsize=8192)
def _config(signature: tuple[tuple[str, Any], ...], row: tuple[float, ...]) -> FmhaConfig:
    """Problems of other sizes have the same kernels."""
    table = {name: np.array([value]) for name, value in zip(_TABLE.names, row, strict=True)}
    kind = config_of(_FAMILIES[int(table["family"][0])])
    return kind(**{**dict(signature), **_TABLE.fields(table, 0, kind)})


_last = threading.local()


def _predicted(problem: FmhaProblem, table: Table, device: DeviceInfo) -> list[Prediction]:
    """Predictions of all rows. Those of the last problem are kept: its features ask for them once more."""
    rows = list(map(tuple, np.stack([table[name] for name in _TABLE.names], axis=1).tolist()))
    if getattr(_last, "problem", None) is not problem or _last.device is not device:
        _last.problem, _last.device, _last.known = problem, device, {}
    known: dict[tuple[float, ...], Prediction] = _last.known
    signature = _signature(problem)
    for row in rows:
        if row not in known:
            known[row] = predict_fmha(problem, _config(signature, row), device)
    return [known[row] for row in rows]


def _numbers(problem: FmhaProblem) -> dict[str, float]:
    every = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    found = {
        "batch": problem.batch, "heads_q": problem.heads_q, "heads_k": problem.heads_k, "group": problem.group,
        "seq_q": problem.seq_q, "seq_k": problem.seq_k, "hdim_q": problem.hdim_q, "hdim_v": problem.hdim_v,
        "bytes_kv": problem.dtype.kv.bytes, "masked": problem.mask.kind is not MaskKind.NONE,
        "window": problem.mask.kind is MaskKind.WINDOW, "varlen": problem.varlen, "paged": problem.paging is not None,
        "steps": problem.softcap > 0, "pairs": problem.pairs / every if every else 1.0, "work": problem.flops,
        "moved": problem.bytes_moved,
    }  # fmt: skip
    assert tuple(found) == _NUMBERS
    return {name: float(value) for name, value in found.items()}


def _wide(problem: FmhaProblem, device: DeviceInfo) -> Iterator[FmhaConfig]:
    for family in families_of(problem):
        plain = config_of(family)(**signature_fields(problem, family, device))
        yield from wide_algorithms(problem, plain)
        portable = _portable(plain, device.arch)
        if family is Family.SPLITKV:
            cut = [item.replace(max_splits_log2=MOST_SPLITS_LOG2) for item in portable]
            yield from (item.replace(pack_gqa=True) for item in cut if problem.group > 1)
            yield from cut
        else:
            yield from portable


@lru_cache(maxsize=64)
def _portable(plain: FmhaConfig, arch: ArchSpec) -> tuple[FmhaConfig, ...]:
    """Cuts of the portable pipelines."""
    kind, family = arch.kind, plain.family
    return tuple(
        plain.replace(**item)
        for item in valid_algorithms(plain, arch)
        if (record := record_of(item["pipeline"], kind)) and not record.algorithms
        and (kind, item["pipeline"], family) in TEMPLATES
    )  # fmt: skip
