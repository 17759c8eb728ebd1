"""How flows become methods: one definition, one docstring, one type for the blocking and the asyncio client."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar

from tilewright.transport.rpc import MISSED, Flow, Settled

__all__ = ["awaiting", "awaiting_as", "blocking", "blocking_as", "renamed"]

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")

SHORT_FLOPS = 10_000_000
"""A product of that many operations takes less than a switch of threads: the loop of events may wait for it."""

# A flow may have an `attempt`, which makes a call without the server where that is possible, or returns what is left of
# a call that was settled (`Settled`), or `MISSED`.
# `self` has `_subject`, the first argument of its flows, and `_drive`, which runs one, made of its arguments.


def blocking(flow: Callable[Concatenate[S, P], Flow[T]]) -> Callable[Concatenate[Any, P], T]:
    attempt = getattr(flow, "attempt", None)
    if attempt is not None:
        return _attempting(flow, attempt)

    @functools.wraps(flow)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._drive(flow, self._subject, *args, **kwargs)
        return result

    return method


def _attempting(
    flow: Callable[Concatenate[S, P], Flow[T]], attempt: Callable[..., Any]
) -> Callable[Concatenate[Any, P], T]:
    @functools.wraps(flow)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found = attempt(self._subject, args, kwargs)
        if type(found) is Settled:
            found = self._drive(found.flow)
        elif found is MISSED:
            found = self._drive(flow, self._subject, *args, **kwargs)
        result: T = found
        return result

    return method


def awaiting(flow: Callable[Concatenate[S, P], Flow[T]]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    attempt = getattr(flow, "attempt", None)

    @functools.wraps(flow)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found = attempt(self._subject, args, kwargs, SHORT_FLOPS) if attempt is not None else MISSED
        if type(found) is Settled:
            found = await self._drive(found.flow)
        elif found is MISSED:
            found = await self._drive(flow, self._subject, *args, **kwargs)
        result: T = found
        return result

    return method


def blocking_as(
    flow: Callable[Concatenate[S, P], Flow[T]], wrap: Callable[[Any, T], U]
) -> Callable[Concatenate[Any, P], U]:
    """``blocking``, with a result that needs to know who drives it."""

    @functools.wraps(flow)
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> U:
        return wrap(self, self._drive(flow, self._subject, *args, **kwargs))

    return method


def awaiting_as(
    flow: Callable[Concatenate[S, P], Flow[T]], wrap: Callable[[Any, T], U]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, U]]:
    @functools.wraps(flow)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> U:
        return wrap(self, await self._drive(flow, self._subject, *args, **kwargs))

    return method


def renamed(ask: Callable[P, T], name: str, result: str) -> Callable[P, T]:
    """The same function by its public name, which Python's own errors about arguments tell, and with the public result
    in its signature.
    """
    assert isinstance(ask, FunctionType)
    found = FunctionType(ask.__code__, ask.__globals__, name, ask.__defaults__, ask.__closure__)
    functools.update_wrapper(found, ask)
    found.__kwdefaults__ = ask.__kwdefaults__
    found.__name__ = found.__qualname__ = name
    found.__annotations__ = ask.__annotations__ | {"return": result}
    del found.__wrapped__  # type: ignore[attr-defined]
    return found
