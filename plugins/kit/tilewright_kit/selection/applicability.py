"""Reasons why a valid kernel cannot compute a problem: the parts of ``Operation.mismatches`` that operations share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from tilewright_kit.config.rules import Violation
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.vocabulary import Binary

__all__ = [
    "Padded",
    "Sized",
    "Team",
    "canonical",
    "other_signature",
    "slices_asked",
    "team_too_large",
    "unpadded_sizes",
]

Triple = tuple[int, int, int]
_CANONICAL = {Binary.MULTI_D_ADD: Binary.ADD, Binary.MULTI_D_MULTIPLY: Binary.MULTIPLY}


class Sized(Protocol):
    """A product of matrices."""

    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...


class Padded(Protocol):
    """A configuration that says of m, n and k whether the kernel handles what its tile does not divide."""

    @property
    def tile(self) -> Triple: ...
    @property
    def pad_m(self) -> bool: ...
    @property
    def pad_n(self) -> bool: ...
    @property
    def pad_k(self) -> bool: ...


class Team(Protocol):
    """A configuration of a kernel that a team of threads runs."""

    @property
    def wave(self) -> Triple: ...
    @property
    def waves(self) -> int: ...


def canonical(step: Binary) -> Binary:
    """A binary step without the number of its operands: ``MultiDAdd`` of one operand is ``Add``."""
    return _CANONICAL.get(step, step)


def other_signature(
    wanted: Mapping[str, tuple[object, object]], unmendable: Collection[str] = ()
) -> Iterator[Violation]:
    """Fields of which the kernel has another value than the problem: ``wanted`` maps a field to (the kernel's, the
    problem's). The fix is the problem's value, but for fields that are ``unmendable`` by themselves.
    """
    for field, (have, want) in wanted.items():
        if have != want:
            fix = {} if field in unmendable else {field: want}
            yield Violation("signature", field, str(have), f"the problem has {field} {want}, the kernel {have}", fix)


def slices_asked(asked: int, have: int, what: str) -> Iterator[Violation]:
    """The caller asked for a number of slices of ``what``, and the kernel makes another. 0 and 1 ask for none."""
    if asked > 1 and have != asked:
        yield Violation(
            "variant", "split_k", have, f"the caller asked for {asked} slices of {what}", {"split_k": asked}
        )


def unpadded_sizes(config: Padded, products: Iterable[Sized]) -> Iterator[Violation]:
    """Sizes that the tile does not divide, of a kernel that does not pad them."""
    products = tuple(products)
    for axis, (name, padded) in enumerate((("m", config.pad_m), ("n", config.pad_n), ("k", config.pad_k))):
        tile = config.tile[axis]
        if not padded and any(getattr(product, name) % tile for product in products):
            reason = f"{name.upper()} is not a multiple of tile_{name} {tile}, and the kernel does not pad"
            yield Violation("padding", f"pad_{name}", False, reason, {f"pad_{name}": True})


def team_too_large(config: Team, device: DeviceInfo) -> Iterator[Violation]:
    """A CPU's kernel runs on a team of as many threads as it has waves, which all run at once."""
    if device.arch.kind == "cpu" and config.waves > max(device.units, 1):
        reason = f"the kernel runs on a team of {config.waves}, the device has {device.units} units"
        yield Violation("team", "wave", config.wave, reason, {"wave": (1, 1, 1)})
