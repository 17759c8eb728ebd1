"""Names that callers use, and what they mean; a name that means nothing is answered with those that come close."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import tilewright_arch
from tilewright_arch import ArchError, ArchSpec
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Operation
from tilewright_kit.selection.strategies import Explicit, FirstFit, Heuristic, Strategy
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError, TilewrightError
from tilewright_server.engine.types import Selection

__all__ = ["Catalogs", "close_kernels", "close_names"]

_NAMES_COMPARED = 500


def close_names(name: str, known: Iterable[str], limit: int = 3) -> str:
    """``known`` names that resemble ``name``, as a phrase; all of them if they are few; empty if none does."""
    from difflib import get_close_matches  # where something was not found only

    names = list(islice(known, _NAMES_COMPARED))
    close = get_close_matches(name, names, n=limit, cutoff=0.5)
    if not close and len(names) <= 2 * limit:
        close = names
    return ", ".join(close)


_FEW = 12
"""Names that are all told where none is close to what was given."""


def close_kernels(name: str, known: Iterable[str], limit: int = 3) -> str:
    """The kernels whose names share most words with ``name``, as a phrase.

    Names of kernels are long and mostly alike, so that similarity of letters would say little, and slowly.
    """
    words = name.split("_")
    wanted = set(words)

    def likeness(candidate: str) -> tuple[int, int]:
        parts = candidate.split("_")
        differing = (place for place, (ours, theirs) in enumerate(zip(words, parts, strict=False)) if ours != theirs)
        return (len(wanted.intersection(parts)), next(differing, len(words)))

    scored = [(likeness(candidate), candidate) for candidate in known]
    # Sorting is stable: of equally close kernels the first declared are named.
    best = sorted(scored, key=lambda item: item[0], reverse=True)[:limit]
    return ", ".join(candidate for (common, _), candidate in best if 2 * common >= len(wanted))


class Catalogs:
    """Operations and strategies by name."""

    def __init__(
        self,
        operations: Mapping[str, Operation[Any, Any]],
        strategies: Mapping[str, Strategy],
        default_strategy: str = "heuristic",
    ) -> None:
        self.operations = operations
        self.strategies: dict[str, Strategy] = {"first_fit": FirstFit(), "heuristic": Heuristic(), **strategies}
        self._default = default_strategy

    def operation(self, name: str) -> Operation[Any, Any]:
        """Raises ``NotFoundError``."""
        operation = self.operations.get(name)
        if operation is None:
            raise _unknown("operation", name, self.operations)
        return operation

    def strategy(self, selection: Selection) -> Strategy:
        """Raises ``NotFoundError``, or ``InvalidArgumentError`` for ``explicit`` without a kernel's name."""
        if selection.kernel:
            return Explicit(selection.kernel)
        name = selection.strategy or self._default
        if name == Explicit.name:
            raise InvalidArgumentError(
                "the strategy explicit needs the name of a kernel",
                field="selection.kernel",
                rule="explicit_kernel",
                fix="name a kernel, or leave the strategy empty",
            )
        strategy = self.strategies.get(name)
        if strategy is None:
            raise _unknown("strategy", name, [*self.strategies, Explicit.name], field="selection.strategy")
        return strategy

    def arch(self, name: str) -> ArchSpec:
        """An arch by id. Raises ``NotFoundError``."""
        try:
            return tilewright_arch.load(name)
        except ArchError as error:
            raise NotFoundError(
                str(error),
                field="arch",
                value=name,
                rule="arch_name",
                fix=_use(close_names(name, tilewright_arch.names())),
            ) from error

    def with_close_kernels(
        self, error: TilewrightError, operation: Operation[Any, Any], device: DeviceInfo
    ) -> TilewrightError:
        """``error``, with names of kernels that come close if it is about a kernel's name."""
        if not isinstance(error, NotFoundError) or error.rule != "kernel_name":
            return error
        names = (
            config.name
            for kernels in operation.kernel_sets.values()
            for config in kernels.expand(device.arch, operation.rules)
        )
        close = close_kernels(error.value, names)
        if not close:
            return error
        return NotFoundError(error.reason, field=error.field, value=error.value, rule=error.rule, fix=f"use {close}")


def _unknown(what: str, name: str, known: Iterable[str], field: str = "") -> NotFoundError:
    known = list(known)
    every = ", ".join(known) if len(known) <= _FEW else ""
    return NotFoundError(
        f"this server has no {what} of that name",
        field=field or what,
        value=name,
        rule=f"{what}_name",
        fix=_use(close_names(name, known) or every),
    )


def _use(names: str) -> str:
    return f"use one of: {names}" if names else ""
