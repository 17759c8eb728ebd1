"""The record of a pipeline: all that planning, rules, code generation and kernel sets know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_fmha.config.arch_section import attention_of
from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import Family
from tilewright_kit.config.rules import Rule, Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Prediction
from tilewright_kit.kernel_sets.declare import Declaration

__all__ = ["Pipeline"]


def _no_cuts(config: FmhaConfig, arch: ArchSpec, pipeline: str) -> Iterator[Mapping[str, Any]]:  # noqa: ARG001
    return iter(())


def _no_mismatches(problem: FmhaProblem, config: FmhaConfig) -> Iterable[Violation]:  # noqa: ARG001
    return ()


@dataclass(frozen=True)
class Pipeline:
    """Pipelines that share a loop, on some kinds of device."""

    names: tuple[str, ...]
    """Names in arch specs, also of those that have no template."""
    kinds: tuple[str, ...]
    """Kinds of device: ``cpu``, ``cuda``, ``hip``."""
    templates: Mapping[tuple[str, str, Family], frozenset[str]]
    """Features of each template, by kind of device, name and family. A rule rejects others, and names the nearest."""
    source: Callable[[FmhaConfig, str], tuple[str, str]]
    """Header of a configuration's template below ``native/include/tilewright`` for a kind of device, and the macro that
    instantiates it.
    """
    predict: Callable[[FmhaProblem, FmhaConfig, DeviceInfo], Prediction]
    """Seconds of a plan."""
    cuts: Callable[[FmhaConfig, ArchSpec, str], Iterator[Mapping[str, Any]]] = _no_cuts
    """Tiles, waves and warp tiles worth trying for a signature on a GPU by the pipeline of that name, the preferred
    first.
    """
    algorithms: Callable[[FmhaProblem, FmhaConfig], Iterator[FmhaConfig]] | None = None
    """Kernels for a problem, by its signature; None: every cut that is valid."""
    rules: tuple[Rule[FmhaConfig], ...] = ()
    """Rules on its kernels, checked after the warp tile is one of the arch's."""
    mismatches: Callable[[FmhaProblem, FmhaConfig], Iterable[Violation]] = _no_mismatches
    """Reasons why one of its kernels cannot compute a problem, beside those of every kernel."""
    declarations: Sequence[Declaration[FmhaConfig]] = ()
    """Kernels of the default set beside those that are declared for every pipeline."""

    def has(self, name: str, kind: str) -> bool:
        """True if ``name`` is one of its pipelines on devices of this kind."""
        return name in self.names and kind in self.kinds

    def drives(self, arch: ArchSpec) -> bool:
        """True if it has a template of one of the arch's pipelines."""
        spec = attention_of(arch)
        offered = spec.pipelines if spec else ()
        return any(kind == arch.kind and name in offered for kind, name, _ in self.templates)
