"""Finding, reading and caching the specs that ship as package data.

Nothing here knows an architecture's name: the files under ``specs/`` are the list.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import SpecError, UnknownArchError, UnsupportedDeviceError
from .parse import parse_document
from .spec import ArchSpec

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

_PACKAGE = __name__.rpartition(".")[0]
_SUFFIX = ".json"


def names() -> tuple[str, ...]:
    """Names of all architectures that have a spec, sorted."""
    return tuple(_files())


@functools.lru_cache(maxsize=256)
def load(name: str) -> ArchSpec:
    """The spec called ``name``, optionally with features: ``"NAME+feature+feature"``.

    Raises ``UnknownArchError``, ``UnknownFeatureError`` or, for a broken file, ``SpecError``.
    """
    base, *features = name.split("+")
    if features:
        return load(base).with_features(features)
    if base not in _files():
        raise UnknownArchError(base, _files())
    source = base + _SUFFIX
    spec = parse_document(_document(base), source)
    if spec.name != base:
        raise SpecError(source, "name", f"must be the file's name {base!r}")
    return spec


def parse_spec(document: Mapping[str, object] | Path, source: str = "") -> ArchSpec:
    """Parse a spec that is not (yet) among the package data: a document or a file's path."""
    resolved, source = resolve(document, source)
    return parse_document(resolved, source)


def from_gcn_arch_name(name: str) -> ArchSpec:
    """The spec for a HIP device's ``gcnArchName``, such as ``"gfx942:sramecc+:xnack-"``.

    A sibling that runs the same sources gets its family's spec with the compiler aimed at it
    and, being another chip, no unit count. Raises ``UnsupportedDeviceError``, without a guess: a
    name that resembles the chip's is that of another chip.
    """
    target = name.split(":")[0]
    known: list[str] = []
    for spec in of_kind("hip"):
        known.extend(spec.match.gcn_arch_names)
        if target == spec.toolchain.gpu_arch:
            return spec
        if target in spec.match.gcn_arch_names:
            return dataclasses.replace(
                spec.with_device(units=0, clock_mhz=0, memory_bytes_per_second=0),
                toolchain=spec.toolchain.retargeted(target),
            )
    raise UnsupportedDeviceError(
        f"{target or 'a GPU without a name'} is not supported; those that are: {', '.join(known)}"
    )


def from_compute_capability(major: int, minor: int) -> ArchSpec:
    """The best spec that an NVIDIA device of compute capability ``major.minor`` can run.

    An exact match wins; else the highest lower one that is forward compatible (the
    architecture-specific ones are not). When the major version differs, binaries would not
    load, so the compiler is aimed at the device itself. Raises ``UnsupportedDeviceError``.
    """
    asked = (major, minor)
    best: ArchSpec | None = None
    for spec in of_kind("cuda"):
        version = spec.match.compute_capability
        if version is None:
            continue
        if version == asked and not spec.match.forward_compatible:
            return spec
        usable = spec.match.forward_compatible and version <= asked
        if usable and (best is None or version > (best.match.compute_capability or (0, 0))):
            best = spec
    if best is None or best.match.compute_capability is None:
        lowest = min(s.match.compute_capability or asked for s in of_kind("cuda"))
        raise UnsupportedDeviceError(
            f"compute capability {major}.{minor} is not supported; the lowest that is: {lowest[0]}.{lowest[1]}"
        )
    if best.match.compute_capability == asked:
        return best
    # Another chip than the one whose figures the spec holds.
    best = best.with_device(units=0, clock_mhz=0, memory_bytes_per_second=0)
    if best.match.compute_capability is not None and best.match.compute_capability[0] != major:
        target = best.toolchain.retargeted(f"sm_{major}{minor}")
        best = dataclasses.replace(best, toolchain=target)
    return best


def resolve(document: Mapping[str, object] | Path, source: str = "") -> tuple[dict[str, object], str]:
    """A document with its ``include`` fragments merged in, and what to call it in errors.

    Fragments come from ``specs/common``; a later one overrides an earlier one, the document
    overrides all. Where both sides hold an object, their entries are merged, one level deep; those of ``operations``
    are sections, whose entries are merged in turn.
    """
    if isinstance(document, Path):
        source = source or document.name
        document = _read_json(document, source)
    source = source or str(document.get("name", "spec"))
    includes = document.get("include", [])
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise SpecError(source, "include", "must be an array of fragment names")
    merged: dict[str, object] = {}
    for name in includes:
        fragment = resources.files(_PACKAGE) / "specs" / "common" / (name + _SUFFIX)
        if not fragment.is_file():
            raise SpecError(source, "include", f"there is no fragment {name!r}")
        merged = _merge(merged, _read_json(fragment, fragment.name))
    merged = _merge(merged, document)
    merged.pop("include", None)
    return merged, source


def _merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    merged = dict(below)
    for key, value in above.items():
        base = merged.get(key)
        if not (isinstance(base, dict) and isinstance(value, dict)):
            merged[key] = value
        elif key == "operations":
            merged[key] = _merge(base, value)
        else:
            merged[key] = {**base, **value}
    return merged


def _read_json(file: Traversable | Path, source: str) -> dict[str, object]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise SpecError(source, "", f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SpecError(source, "", "must be an object")
    return value


def of_kind(kind: str) -> list[ArchSpec]:
    """All specs of a kind of device, by name; no others are parsed."""
    return [load(name) for name in names() if _document(name).get("kind") == kind]


@functools.cache
def _document(name: str) -> dict[str, object]:
    source = name + _SUFFIX
    return resolve(_read_json(_files()[name], source), source)[0]


@functools.cache
def _files() -> dict[str, Traversable]:
    folder = resources.files(_PACKAGE) / "specs"
    found = [file for file in folder.iterdir() if file.name.endswith(_SUFFIX)]
    return {f.name.removesuffix(_SUFFIX): f for f in sorted(found, key=lambda f: f.name)}
