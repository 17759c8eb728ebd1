"""Calls on NumPy's arrays, or on tensors of a GPU, that were made before, all alike but for the arrays: launched by
what was settled then, in this process or, as a prepared plan is, by the server. The only work of such a call is to
recognise it.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from tilewright.dispatch.bindings.fast_path import launch_report
from tilewright.dispatch.bindings.in_place import InPlace
from tilewright.dispatch.operands.slots import Slot
from tilewright.dispatch.plans.plan import PlanState
from tilewright.errors import TilewrightError
from tilewright.gpu.driver import LEGACY_STREAM
from tilewright.gpu.streams import stream_reader
from tilewright.session.state import Core
from tilewright.tensor.device_array import maker
from tilewright.tensor.families import FAMILIES, family_of
from tilewright.tensor.interop import DeviceTensor
from tilewright.transport.rpc import MISSED, Flow, Settled
from tilewright.types.addresses import address_of
from tilewright.types.report import Report
from tilewright.types.spec import Spec, fresh

__all__ = ["Result", "attempt", "settle"]

MAX_CALLS = 1024
"""Remembered of one client."""
_ARRAY = np.ndarray
_WORDS = frozenset({int, bool, str, type(None), type, np.dtype})
"""Types of arguments that are equal only if they mean the same."""


Words = Callable[[TilewrightError], TilewrightError]


def _same(error: TilewrightError) -> TilewrightError:
    return error


class Result(NamedTuple):
    """One result of a call."""

    output: str
    """Name of the operand that it is."""
    given: bool
    """True if the caller gave the array."""
    swapped: bool
    """True if it is returned with its rows before its heads."""


class _Here(ABC):
    """A call that is launched in this process."""

    def __init__(
        self,
        state: PlanState,
        sources: Sequence[int],
        made: Sequence[Callable[[], Any] | None],
        results: Sequence[tuple[int, bool]],
        listed: bool,
    ) -> None:
        self._state = state
        self._core = state.core
        self._sources = tuple(sources)
        """Index of the array of each operand among those of the call; -1 for an output that is made."""
        self._made = tuple(made)
        self._results = tuple(results)
        """Index of an operand, and whether it is returned with its heads last."""
        self.listed = listed
        here: Any = state.here
        self.flops = here.plan.flops
        last = len(self._made) - 1
        self._simple = not listed and self._results == ((last, False),) and last == len(here.inputs)
        """True if the last operand is the result, as it is."""

    def run(self, arrays: Sequence[Any], places: list[int]) -> Any:  # noqa: ARG002 - of those on a device
        state = self._state
        here = state.here
        if here is None or state.closed or self._core.closed or state.is_due:
            return MISSED
        operands = [
            arrays[source] if make is None else make() for source, make in zip(self._sources, self._made, strict=True)
        ]
        took = self._launch(here, operands)
        if took < 0:
            return MISSED  # the long way finds out what is wrong, and whether the server can do it
        self._core.report = functools.partial(launch_report, state.report, took, "caller")
        found = [operands[index].swapaxes(1, 2) if swap else operands[index] for index, swap in self._results]
        if self.listed:
            return found
        return found[0] if len(found) == 1 else tuple(found)

    @abstractmethod
    def _launch(self, here: InPlace, operands: Sequence[Any]) -> int:
        """Nanoseconds that a launch on a CPU took; less than 0 if nothing was launched."""


class _OnHost(_Here):
    def __init__(self, *settled: Any) -> None:
        super().__init__(*settled)
        here: Any = self._state.here
        count = len(here.inputs)
        self._given = tuple(index for index in range(count, len(self._made)) if self._made[index] is None)
        """Indices of the outputs that the caller gives."""

    def run(self, arrays: Sequence[Any], places: list[int]) -> Any:
        make = self._made[-1]
        if not self._simple or make is None:
            return super().run(arrays, places)
        # The same with nothing that other calls need: a small product takes no longer than this.
        state, core = self._state, self._core
        here = state.here
        if here is None or state.closed or core.closed or state.is_due:
            return MISSED
        out = make()
        places = [address_of(arrays[source]) for source in self._sources[:-1]]
        plan = here.plan
        addresses = plan.pack(*places, address_of(out))
        begin = perf_counter_ns()
        status = plan.run(addresses)
        took = perf_counter_ns() - begin
        if status:
            return MISSED
        core.report = functools.partial(launch_report, state.report, took, "caller")
        return out

    def _launch(self, here: InPlace, operands: Sequence[Any]) -> int:
        plan = here.plan
        for index in self._given:
            if not operands[index].flags.writeable:
                return -1
        addresses = plan.pack(*map(address_of, operands))
        begin = perf_counter_ns()
        if plan.run(addresses):
            return -1
        return perf_counter_ns() - begin


class _OnDevice(_Here):
    """One on tensors of one library on one GPU."""

    def __init__(self, lead: DeviceTensor, address: Callable[[Any], int], *settled: Any) -> None:
        super().__init__(*settled)
        self._gpu, self._ordinal = lead.gpu, lead.ordinal
        self._stream = stream_reader(lead.library, lead.ordinal)
        self._default = self._gpu.handle(LEGACY_STREAM)
        self._address = address
        given = len(self._made) - (self._made[-1] is not None)
        self._simple = self._simple and self._sources[:given] == tuple(range(given))
        """True, too, only if the call's arrays are its operands in this order."""
        self._told: tuple[Report, Callable[[], Report]] | None = None
        """The last launch's report, behind the plan's own that it was made of."""

    def run(self, arrays: Sequence[Any], places: list[int]) -> Any:
        if not self._simple:
            return super().run(arrays, places)
        # The same with nothing that other calls need: the host's time decides how fast small products follow.
        state, core = self._state, self._core
        here = state.here
        if here is None or state.closed or core.closed or state.is_due or (core.maps and core.mapped):
            return MISSED
        make = self._made[-1]
        if make is None:
            out = arrays[-1]
        else:
            out = make()
            places.append(self._address(out))
        if here.run_again(self._gpu, self._ordinal, tuple(places), self._stream() or self._default):
            return MISSED
        told = self._told
        if told is None or told[0] is not state.report:
            told = self._told = state.report, functools.partial(launch_report, state.report, 0, "caller")
        core.report = told[1]
        return out

    def _launch(self, here: InPlace, operands: Sequence[Any]) -> int:
        if self._core.mapped:  # some may be the server's memory
            return -1
        places = tuple([self._address(operand) for operand in operands])
        handle = self._stream() or self._default
        return -1 if here.run_again(self._gpu, self._ordinal, places, handle) else 0


class _ByServer:
    """One on arrays of the host: what is left of it is the call of its plan."""

    flops = 0
    """Operations of this process."""

    def __init__(
        self, state: PlanState, sources: Sequence[int], results: Sequence[Result], listed: bool, words: Words
    ) -> None:
        self._state = state
        count = len(state.inputs)
        self._inputs = tuple(sources[:count])
        """Index of the array of each input among those of the call."""
        self._outputs = {slot.name: source for slot, source in zip(state.outputs, sources[count:], strict=True)}
        """Likewise, by name; -1 for one that is made."""
        self._names = tuple(item.output for item in results)
        self._listed = listed
        self._words = words

    def run(self, arrays: Sequence[Any], places: list[int]) -> Any:  # noqa: ARG002 - as above
        if self._state.closed or self._state.core.closed:
            return MISSED
        return Settled(functools.partial(self._flow, arrays))

    def _flow(self, arrays: Sequence[Any]) -> Flow[Any]:
        inputs = [arrays[index] for index in self._inputs]
        out: Any = {name: arrays[index] if index >= 0 else None for name, index in self._outputs.items()}
        if len(out) == 1:
            (out,) = out.values()
        try:
            result = yield from self._state.execute(inputs, out, {}, 1, None)
        except TilewrightError as error:
            raise self._words(error) from None
        found = [result] if len(self._outputs) == 1 else [result[name] for name in self._names]
        return found if self._listed else found[0] if len(found) == 1 else tuple(found)


def _maker(spec: Spec) -> Callable[[], Any]:
    if spec.strides is None:
        return functools.partial(np.empty, spec.shape, spec.dtype)
    return functools.partial(fresh, np.empty, spec)


def attempt(name: str, core: Core, args: Sequence[Any], kwargs: Mapping[str, Any], most_flops: float = math.inf) -> Any:
    """The result of a call that was settled, or its flow if the server launches it; ``MISSED`` if it was not settled,
    or takes more than ``most_flops`` operations here.
    """
    if not core.direct:
        return MISSED
    key: list[Any] = [name]
    arrays: list[Any] = []
    places: list[int] = []
    for value in args:
        kind = type(value)
        if kind is _ARRAY:
            key += (value.dtype, value.shape, value.strides)
        elif (family := FAMILIES.get(kind)) is not None:
            if not family.describe(value, key, places):
                return MISSED
        elif not _describe(value, key, arrays, places):
            return MISSED
        else:
            continue
        arrays.append(value)
    for option, value in kwargs.items():
        key.append(option)
        if (family := FAMILIES.get(type(value))) is not None:
            if not family.describe(value, key, places):
                return MISSED
            arrays.append(value)
        elif not _describe(value, key, arrays, places):
            return MISSED
    settled: _Here | _ByServer | None = core.direct.get(tuple(key))
    if settled is None or settled.flops > most_flops:
        return MISSED
    return settled.run(arrays, places)


def _describe(value: Any, key: list[Any], arrays: list[Any], places: list[int]) -> bool:
    """Add what a call with this argument is recognised by; false if that cannot be said. ``places`` has the addresses
    of arrays on devices.
    """
    kind = type(value)
    if kind is _ARRAY:
        key += (value.dtype, value.shape, value.strides)
        arrays.append(value)
    elif kind is float:
        key += (kind, value.hex())  # as numbers, 0.0 and -0.0 are equal
    elif kind in _WORDS or isinstance(value, np.dtype):
        key += (kind, value)
    elif kind is tuple or kind is list:
        key += (kind, len(value))
        return all(_describe(item, key, arrays, places) for item in value)
    else:
        family = family_of(kind)
        if family is None or not family.describe(value, key, places):
            return False
        arrays.append(value)
    return True


def settle(
    name: str,
    core: Core,
    labels: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    state: PlanState,
    operands: Sequence[Any],
    results: Sequence[Result],
    listed: bool,
    words: Words = _same,
) -> None:
    """Remember a call, if it follows from its arrays' layouts and its other arguments alone. ``labels`` are the names
    of positional arguments; ``operands`` are those of the plan, in its order; ``words`` puts errors in the caller's.
    """
    key: list[Any] = [name]
    arrays: list[Any] = []
    places: list[int] = []
    names: list[str] = []
    for label, value in zip(labels, args, strict=False):
        if not _describe(value, key, arrays, places):
            return
        names += _names(label, value)
    for option, value in kwargs.items():
        key.append(option)
        if not _describe(value, key, arrays, places):
            return
        names += _names(option, value)
    if len(args) > len(labels) or state.renew_at != math.inf:
        return
    slots = (*state.inputs, *state.outputs)
    given = {item.output for item in results if item.given}
    made = {slot.name for slot in state.outputs} - given
    sources = []
    for slot, operand in zip(slots, operands, strict=True):
        source = -1 if slot.name in made else _source(slot.name, operand, names, arrays)
        if source is None:
            return
        sources.append(source)
    if set(range(len(arrays))) - set(sources):  # an array that counts by what is in it, or that was copied
        return
    order = {slot.name: index for index, slot in enumerate(slots)}
    found = [(order[item.output], item.swapped and not item.given) for item in results]
    if any(item.swapped and item.given for item in results):
        return
    settled: _Here | _ByServer | None
    if state.here is not None:
        settled = _settled(state, slots, sources, operands, arrays, found, listed)
    elif kwargs.get("timeout") is None and _as_given(sources, operands, arrays, results):
        settled = _ByServer(state, sources, results, listed, words)
    else:
        return
    if settled is None:
        return
    if len(core.direct) >= MAX_CALLS:
        core.direct.clear()
    core.direct[tuple(key)] = settled


def _settled(
    state: PlanState,
    slots: Sequence[Slot],
    sources: Sequence[int],
    operands: Sequence[Any],
    arrays: Sequence[Any],
    results: Sequence[tuple[int, bool]],
    listed: bool,
) -> _Here | None:
    here: Any = state.here
    pairs = list(zip(slots, sources, strict=True))
    if here.plan.on_cpu:
        made = [_maker(slot.spec) if source < 0 else None for slot, source in pairs]
        return _OnHost(state, sources, made, results, listed)
    families = {family_of(type(array)) for array in arrays}
    family = families.pop() if len(families) == 1 else None
    lead = operands[0]
    if family is None or not isinstance(lead, DeviceTensor) or lead.library != family.library:
        return None
    fresh_ones = [maker(lead, slot.spec) if source < 0 else None for slot, source in pairs]
    if any(make is None and source < 0 for make, source in zip(fresh_ones, sources, strict=True)):
        return None
    return _OnDevice(lead, family.address, state, sources, fresh_ones, results, listed)


def _as_given(
    sources: Sequence[int], operands: Sequence[Any], arrays: Sequence[Any], results: Sequence[Result]
) -> bool:
    """True if the operands are the very arrays of the host that the call was given, and results those of the plan."""
    given = [(operands[index], arrays[source]) for index, source in enumerate(sources) if source >= 0]
    same = all(operand is array and type(array) is _ARRAY for operand, array in given)
    return same and not any(item.swapped for item in results) and all(type(item) is _ARRAY for item in operands)


def _names(label: str, value: Any) -> list[str]:
    """Names of the arrays in an argument."""
    if type(value) in (tuple, list):
        return [name for index, item in enumerate(value) for name in _names(f"{label}[{index}]", item)]
    return [label] if type(value) is _ARRAY or family_of(type(value)) is not None else []


def _source(name: str, operand: Any, names: Sequence[str], arrays: Sequence[Any]) -> int | None:
    """Index of the array that an operand is a view of, from its first element on; ``None`` if that is not certain."""
    place = _extent(operand)
    if place is None or not place[1]:
        return None
    found = [index for index, array in enumerate(arrays) if _extent(array) == place]
    if len(found) > 1:
        found = [index for index in found if names[index] == name]
    return found[0] if len(found) == 1 else None


def _extent(value: Any) -> tuple[int, int] | None:
    """Address of the first element, and the number of elements."""
    if isinstance(value, _ARRAY):
        return address_of(value), value.size
    if isinstance(value, DeviceTensor):
        return value.address, math.prod(value.spec.shape)
    family = family_of(type(value))
    return None if family is None else (family.address(value), math.prod(value.shape))
