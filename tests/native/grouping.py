"""Kernels that are compiled together: what they share is compiled once, and what no test of a run wants is not."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import pytest

__all__ = ["Units", "wanted"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def wanted(request: pytest.FixtureRequest, cases: Mapping[str, T]) -> list[T]:
    """The cases whose names are parameters of those tests of the request's module that this run has."""
    from selected import Selected  # tests find it; scripts of this folder want nothing of a run

    run = Selected(request)
    return [case for name, case in cases.items() if name in run]


class Units(Generic[K]):
    """Files of compiled kernels in a folder, each with a few kernels that are ``alike`` and have the same ``head``.

    ``text`` is a kernel's source under a name, below the head; ``build`` compiles a source file into another file.
    ``options`` is all on which the latter depends beside the source and the headers. Other processes may want the same
    kernels at the same time.
    """

    def __init__(
        self,
        folder: Path,
        kernels: Iterable[K],
        first: Collection[K] | None,
        build: Callable[[Path, Path], None],
        *,
        head: Callable[[K], str],
        text: Callable[[K, str], str],
        options: str,
        size: int,
        alike: Callable[[K], Hashable] = lambda _: None,
    ) -> None:
        """``first``: those that this run wants, which are compiled together; others then are compiled alone."""
        self._folder, self._compile, self._options, self._head, self._text = folder, build, options, head, text
        self.names = {kernel: f"k{_digest(repr(kernel))}" for kernel in kernels}
        self._groups = _groups(self.names, first, size, lambda kernel: (head(kernel), alike(kernel)))
        self._files: dict[int, Path] = {}

    def file(self, kernel: K) -> Path:
        """The one that has the kernel; the same path for all kernels of a file."""
        path = self._path(kernel)
        if not path.exists():
            self._build(self._groups[kernel])
        return self._files.setdefault(path.stat().st_ino, path)

    def _path(self, kernel: K) -> Path:
        words = (self._options, self._head(kernel), self._text(kernel, self.names[kernel]))
        return self._folder / f"{_digest(*words)}.kernel"

    def _build(self, group: Sequence[K]) -> None:
        with ExitStack() as held:
            for path in sorted(map(self._path, group)):  # all processes take locks in the same order
                fcntl.flock(held.enter_context(path.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
            missing = [kernel for kernel in group if not self._path(kernel).exists()]
            if missing:
                source, partial = (self._path(missing[0]).with_suffix(suffix) for suffix in (".cpp", ".partial"))
                texts = [self._text(kernel, self.names[kernel]) for kernel in missing]
                source.write_text("".join([self._head(missing[0]), *texts]))
                self._compile(source, partial)
                for kernel in missing:
                    self._path(kernel).hardlink_to(partial)
                partial.unlink()


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _groups(
    kernels: Iterable[K], first: Collection[K] | None, size: int, alike: Callable[[K], Hashable]
) -> dict[K, Sequence[K]]:
    together: dict[Hashable, list[K]] = {}
    for kernel in kernels:
        alone = first is not None and kernel not in first
        together.setdefault(kernel if alone else ("together", alike(kernel)), []).append(kernel)
    found: dict[K, Sequence[K]] = {}
    for same in together.values():
        for at in range(0, len(same), size):
            found.update(dict.fromkeys(same[at : at + size], same[at : at + size]))
    return found
