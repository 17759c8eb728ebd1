"""Error types of this package. All are ``ValueError``s, so callers may catch broadly."""

from __future__ import annotations

from collections.abc import Iterable


class ArchError(ValueError):
    """Base of every error that this package raises."""


class SpecError(ArchError):
    """A spec file or document is malformed.

    ``source`` names the document, ``field`` is the dotted path of the offending field
    (for example ``caches.l2_bytes`` or ``waves[2]``; empty for the document itself).
    """

    def __init__(self, source: str, field: str, problem: str) -> None:
        self.source = source
        self.field = field
        self.problem = problem
        super().__init__(f"{source}: {field or 'document'}: {problem}")

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, str, str]]:
        return type(self), (self.source, self.field, self.problem)


class UnknownNameError(ArchError):
    """A name is not among the known ones. ``name``, ``known`` and ``suggestion`` say which."""

    what = "name"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        import difflib  # where an arch was not found only

        close = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        self.suggestion = close[0] if close else None
        hint = f"; did you mean {self.suggestion!r}?" if self.suggestion else ""
        super().__init__(f"unknown {self.what} {name!r}{hint} (known: {', '.join(self.known) or 'none'})")

    def __reduce__(self) -> tuple[type[UnknownNameError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.name, self.known)


class UnknownArchError(UnknownNameError):
    """No spec describes the architecture that was asked for."""

    what = "architecture"


class UnknownFeatureError(UnknownNameError):
    """The architecture has no optional feature of that name."""

    what = "feature"


class UnknownPipelineError(UnknownNameError):
    """The architecture has no pipeline of that name."""

    what = "pipeline"


class UnsupportedDeviceError(ArchError):
    """A machine was identified, but no spec covers it (too old, or not describable)."""
