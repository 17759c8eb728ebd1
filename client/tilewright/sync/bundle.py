"""Bundles: files of launch plans that run in this process, without a server and without a compiler."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.dispatch.bindings.in_place import BoundInPlace, InPlace
from tilewright.dispatch.operands.slots import Slot
from tilewright.errors import InvalidArgumentError, TilewrightError, UnsupportedError, of_code
from tilewright.launch.library import Library, load_library
from tilewright.launch.opened import OpenedPlan
from tilewright.types.spec import Array, Spec, as_array, contiguous_strides, fresh

__all__ = ["Bundle", "BundlePlan", "BundleProblem", "load_bundle"]


def load_bundle(path: str | PathLike[str], *, trusted_keys: str | PathLike[str] | None = None) -> Bundle:
    """Open a bundle. Its plans and their code are read when they are first used.

    ``trusted_keys`` is a file of public Ed25519 keys (PEM), one of which must have signed the bundle; its signature
    lies beside it (``FILE.sig``). Others must not be able to write to the bundle while it is open.

    Raises ``NotFoundError`` for a file that cannot be read, ``InvalidArgumentError`` for one that is no bundle or is
    damaged, or no file of keys, ``UnsupportedError`` for a bundle of another version and where ``cryptography`` is
    missing for signatures, ``UnavailableError`` where libtilewright is missing, ``AccessError`` for a bundle that no
    trusted key has signed (rule ``signature_missing``, ``signature_key``, ``signature_content`` or
    ``signature_damaged``).
    """
    library = load_library()
    if trusted_keys is not None:
        _check_signature(Path(path), Path(trusted_keys))
    return Bundle(library, Path(path))


def _check_signature(path: Path, trusted: Path) -> None:
    from tilewright_native.signatures import SignatureProblem, check_file, read_trusted

    try:
        check_file(path, read_trusted(trusted))
    except SignatureProblem as problem:
        raise of_code(problem.code)(problem.reason, **problem.words) from problem.__cause__


@dataclass(frozen=True)
class BundleProblem:
    """A problem of a bundle: its name says what is computed, on which tensors, for an architecture."""

    name: str
    arch: str


class BundlePlan:
    """A problem of a bundle that runs here. Thread-safe.

    Calls take the operands in the order of ``inputs``, as NumPy arrays for a plan of a CPU (such that lie otherwise are
    copied) and as tensors of PyTorch or CuPy for one of a GPU, and return the output (of several, a dict).
    """

    def __init__(self, library: Library, handle: int) -> None:
        try:
            info = library.describe(handle)
            self.name = (info.name or b"").decode("utf-8", "replace")
            self.arch = (info.arch or b"").decode("utf-8", "replace")
            self.operation = (info.operation or b"").decode("utf-8", "replace")
            self.workspace_bytes = int(info.workspace_bytes)
            self.flops = int(info.flops)
            slots = [_slot(library, handle, index) for index in range(info.operands)]
        except BaseException:
            library.close_plan(handle)
            raise
        inputs = [slot for slot, is_output in slots if not is_output]
        outputs = [slot for slot, is_output in slots if is_output]
        opened = OpenedPlan(library, handle, tuple(slot.name for slot in (*inputs, *outputs)))
        self._here = InPlace(None, opened, inputs, outputs, "")

    @property
    def inputs(self) -> dict[str, Spec]:
        """The inputs by name, in the order in which calls take them."""
        return {slot.name: slot.spec for slot in self._here.inputs}

    @property
    def outputs(self) -> dict[str, Spec]:
        return {slot.name: slot.spec for slot in self._here.outputs}

    def __call__(self, *inputs: Any, out: Any = None, stream: int | None = None) -> Any:
        """Launch once. ``out`` is an array for the output (a mapping, if there are several); it is made if it is left
        out.

        Raises ``InvalidArgumentError`` for operands that do not fit the plan, ``DeviceError``.
        """
        return self._here.launch(self._values(inputs, out, copied=True), stream)[1]

    def bind(self, *inputs: Any, out: Any = None) -> BundleLaunch:
        """Settle a launch on these operands, which are used in place from then on."""
        return BundleLaunch(BoundInPlace(self._here, self._values(inputs, out, copied=False)))

    def _values(self, inputs: tuple[Any, ...], out: Any, *, copied: bool) -> list[Any]:
        """Operands in the order of the plan; ``None`` for outputs that are to be made."""
        here = self._here
        if len(inputs) != len(here.inputs):
            names = ", ".join(slot.name for slot in here.inputs)
            raise InvalidArgumentError(
                f"the plan has {len(here.inputs)} inputs, not {len(inputs)}",
                field="inputs",
                value=len(inputs),
                rule="operand_count",
                fix=f"give {names}, in this order",
            )
        given = out if isinstance(out, Mapping) else {here.outputs[0].name: out} if len(here.outputs) == 1 else {}
        unknown = next((name for name in given if name not in self.outputs), None)
        if unknown is not None or (out is not None and not given):
            raise InvalidArgumentError(
                "out names no output of the plan",
                field="out",
                value=unknown or type(out).__name__,
                rule="operand_names",
                fix=f"give an array for each of {', '.join(self.outputs)}, by name if there are several",
            )
        values = [*inputs, *(given.get(slot.name) for slot in here.outputs)]
        if not here.plan.on_cpu:
            return values
        laid = [_laid(slot, value, copied) for slot, value in zip(here.inputs, inputs, strict=True)]
        for slot in here.outputs:
            target = given.get(slot.name)
            if target is not None and not (isinstance(target, np.ndarray) and slot.check(target)):
                raise slot.refuse_output(target)
        return [*laid, *values[len(laid) :]]


def _laid(slot: Slot, value: Any, copied: bool) -> Array:
    """The array as the plan reads it: itself, or a copy if that is allowed."""
    array = as_array(value, slot.name)
    if slot.check(array):
        return array
    if not copied:
        raise InvalidArgumentError(
            f"{slot.name} does not lie as planned, and what is bound is used in place",
            field=slot.name,
            value=array.strides,
            rule="plan_operand",
            fix="bind an array with the strides of plan.inputs, or call the plan, which copies",
        )
    slot.check_copy(array)
    laid = fresh(np.empty, slot.spec)
    laid[...] = array
    return laid


class BundleLaunch:
    """A launch of a bundle's plan that is settled but for its stream."""

    def __init__(self, bound: BoundInPlace) -> None:
        self._bound = bound
        self.out = bound.result
        """The output (of several, a dict)."""

    def __call__(self, stream: int | None = None) -> Any:
        """Launch, on a GPU on the current stream unless another is given; returns ``out``."""
        self._bound(stream)
        return self.out


class Bundle(Mapping[str, BundlePlan]):
    """Plans by their names. Thread-safe.

    A plan is opened at its first use, and stays open with the bundle. A context manager; plans that were taken from it
    stay valid after ``close``.
    """

    def __init__(self, library: Library, path: Path) -> None:
        self.path = path
        self._library = library
        self._handle = library.open_bundle(path)
        self._finalizer = weakref.finalize(self, library.close_bundle, self._handle)
        self._finalizer.atexit = False
        self._lock = threading.Lock()
        self._plans: dict[str, BundlePlan] = {}
        self.problems = tuple(BundleProblem(name, arch) for name, arch in library.bundle_entries(self._handle))
        """All problems, also those for other machines, by name and then architecture."""
        self._names = tuple(dict.fromkeys(item.name for item in self.problems))

    def __getitem__(self, name: str) -> BundlePlan:
        """Raises ``KeyError`` for a name that the bundle has not, ``UnsupportedError`` for a problem that it has for
        other machines only or that needs more threads than this process has, ``InvalidArgumentError`` for damage.
        """
        with self._lock:
            self._require_open()
            found = self._plans.get(name)
            if found is None:
                if name not in self._names:
                    raise KeyError(name)
                found = self._plans[name] = BundlePlan(self._library, self._library.find_in_bundle(self._handle, name))
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def verify(self) -> None:
        """Read everything and check all digests. Raises ``InvalidArgumentError`` for damage."""
        with self._lock:
            self._require_open()
            self._library.verify_bundle(self._handle)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._finalizer()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise InvalidArgumentError(
                "the bundle is closed", field="bundle", value=str(self.path), rule="bundle_closed", fix="open it again"
            )


def _slot(library: Library, handle: int, index: int) -> tuple[Slot, bool]:
    """An operand of a plan, and if it is an output."""
    info = library.operand(handle, index)
    name = (info.name or b"").decode("utf-8", "replace")
    shape, strides = tuple(info.shape[: info.rank]), tuple(info.strides[: info.rank])
    try:
        spec = Spec.of(shape, (info.dtype or b"").decode("utf-8", "replace"), strides)
    except TilewrightError as error:
        raise UnsupportedError(
            f"the operand {name} of a plan cannot be an array: {error.message}",
            field=name,
            value=error.value,
            rule="bundle_operand",
            fix="launch it from C, or build the bundle with the release of this client",
        ) from error
    steps = contiguous_strides(shape) if spec.strides is None else spec.strides
    return Slot(name, spec, tuple(step * int(np.dtype(spec.dtype).itemsize) for step in steps)), info.role == 1
