"""Common parts of calls of named operations: the arguments that all take, and runs and plans out of what they ask.

A function that says what a call asks (an ``Asked``) becomes two flows, one that runs it and one that prepares it.
Arguments that several such functions take are a ``TypedDict`` with its defaults beside it, and come as ``**options``.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypedDict

import numpy as np

from tilewright.dispatch.operands.request import BuildPolicy, config_text
from tilewright.dispatch.plans.plan import PlanState, prepare
from tilewright.dispatch.plans.repeated_calls import Result, attempt, settle
from tilewright.dispatch.run import Call, made
from tilewright.errors import TilewrightError
from tilewright.operations.layouts import heads_first, heads_last
from tilewright.operations.matrices import deliver
from tilewright.session.state import Core
from tilewright.tensor.host import HostViews
from tilewright.transport.drive import renamed
from tilewright.transport.rpc import Flow
from tilewright.types.arguments import Placement

__all__ = ["CHOICE", "Asked", "Choice", "choice_of", "planning", "running"]

P = ParamSpec("P")


class Choice(TypedDict, total=False):
    """How a call is to be made: the arguments that every operation takes; see ``run``."""

    kernel: str | None
    strategy: str | None
    build: BuildPolicy
    device: str | None
    timeout: float | None
    launch: Placement | None
    config: Mapping[str, Any] | None


CHOICE: Choice = {
    "kernel": None, "strategy": None, "build": "wait", "device": None, "timeout": None, "launch": None,
    "config": None,
}  # fmt: skip


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Asked:
    """A call, in the generic call's terms."""

    operation: str
    inputs: Mapping[str, Any]
    attributes: Mapping[str, Any]
    choice: Mapping[str, Any]
    outs: Mapping[str, Any]
    """Outputs as the caller gave them, in the order of the results; None: fresh ones."""
    targets: dict[str, Any]
    """Targets that the server writes."""
    swapped: Collection[str] = ()
    """Outputs whose rows come before their heads."""
    extra: tuple[Any, ...] = ()
    """Results that are known already."""
    squeezed: tuple[int, ...] = ()
    """Axes that results have beyond those that the caller's operands have."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Words of errors that are the caller's own in this call, beside ``WORDS``."""
    listed: bool = False
    """The results come as a list, however many they are; for none there is nothing to call."""


WORDS = {
    "window_left": "window", "window_right": "window", "causal": "is_causal", "MultiDAdd": "add",
    "MultiDMultiply": "multiply", "Multiply": "multiply", "Add": "add",
}  # fmt: skip
"""The server's words for what callers say otherwise."""
_BYTES = {"randval"}
"""Outputs that are unsigned bytes, for which the protocol has no element type."""


def in_words(error: TilewrightError, own: Mapping[str, str]) -> TilewrightError:
    """The same error in the words of the arguments that the caller gave."""
    words = {**WORDS, **own}
    pattern = re.compile(rf"\b(?:attributes\.)?({'|'.join(map(re.escape, words))})\b")
    for part in ("message", "field", "fix"):
        text = pattern.sub(lambda found: words[found[1]], getattr(error, part))
        setattr(error, part, text.replace("attributes.", ""))
    error.args = (error.message,)
    return error


def _finished(name: str, result: Any, squeezed: tuple[int, ...]) -> Any:
    """A result as callers expect it."""
    if name in _BYTES:
        result = result.view(np.uint8) if isinstance(result, np.ndarray) else _torch_bytes(result)
    for axis in squeezed:
        result = result.squeeze(axis)
    return result


def _torch_bytes(result: Any) -> Any:
    torch: Any = sys.modules.get("torch")
    return result.view(torch.uint8) if torch is not None and isinstance(result, torch.Tensor) else result


def choice_of(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in CHOICE}


def running(
    ask: Callable[Concatenate[Core, P], Asked], defaults: Mapping[str, Any] = CHOICE
) -> Callable[Concatenate[Core, P], Flow[Any]]:
    """The flow that makes a call; a single result comes alone, several as a tuple, or any number as a list where the
    call is ``listed``.
    """
    named, known = _named(ask, ask.__name__.lstrip("_"), "Flow[Any]", defaults)
    labels = [name for name, item in inspect.signature(ask).parameters.items() if item.kind in _POSITIONAL][1:]

    @functools.wraps(named)
    def flow(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> Flow[Any]:
        views = HostViews()
        found = yield from on_arrays(core, *views.view(args), **views.view(kwargs))
        return views.tensor(found)

    def on_arrays(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> Flow[Any]:
        _check_names(named.__name__, kwargs, known)
        asked = named(core, *args, **kwargs)
        if asked.listed and not asked.outs:
            return []
        try:
            done = yield from made(core, _call(asked))
        except TilewrightError as error:
            raise in_words(error, asked.words) from None
        found: list[Any] = []
        for name, out in asked.outs.items():
            if name in asked.swapped:
                result = deliver(core, heads_first(out, name), done.results[name])
                found.append(heads_last(result) if out is None else out)
            else:
                found.append(deliver(core, out, done.results[name]))
        found = [_finished(name, item, asked.squeezed) for name, item in zip(asked.outs, found, strict=True)]
        if not (asked.extra or asked.squeezed or _BYTES & asked.outs.keys()):
            results = [Result(name, out is not None, name in asked.swapped) for name, out in asked.outs.items()]
            words = functools.partial(in_words, own=asked.words)
            settle(named.__name__, core, labels, args, kwargs, done.state, done.operands, results, asked.listed, words)
        found += asked.extra
        if asked.listed:
            return found
        return found[0] if len(found) == 1 else tuple(found)

    flow.attempt = functools.partial(attempt, named.__name__)  # type: ignore[attr-defined]
    return flow


def _call(asked: Asked) -> Call:
    choice = asked.choice
    return Call(
        asked.operation,
        asked.inputs,
        asked.targets,
        asked.attributes,
        (choice["kernel"], choice["strategy"], choice["build"], choice["device"], config_text(choice["config"])),
        choice["timeout"],
        choice["launch"],
    )


def planning(
    ask: Callable[Concatenate[Core, P], Asked], takes: str, defaults: Mapping[str, Any] = CHOICE
) -> Callable[Concatenate[Core, P], Flow[PlanState]]:
    """The flow that prepares a plan for such calls. ``takes`` says in its help how the plan is called."""
    name = ask.__name__.lstrip("_")
    named, known = _named(ask, f"plan_{name}", "Flow[PlanState]", defaults)

    @functools.wraps(named)
    def flow(core: Core, /, *args: P.args, **kwargs: P.kwargs) -> Flow[PlanState]:
        _check_names(named.__name__, kwargs, known)
        views = HostViews()
        asked = named(core, *views.view(args), **views.view(kwargs))
        try:
            return (
                yield from prepare(core, asked.operation, asked.inputs, asked.targets, asked.attributes, **asked.choice)
            )
        except TilewrightError as error:
            raise in_words(error, asked.words) from None

    flow.__doc__ = (
        f"Prepare ``{name}`` for operands like these: arrays, ``Spec``, or ``(shape, dtype)``. Calling the plan does\n"
        f"    no planning.\n\n    {takes}\n    "
    )
    return flow


def _named(
    ask: Callable[Concatenate[Core, P], Asked], name: str, result: str, defaults: Mapping[str, Any]
) -> tuple[Callable[Concatenate[Core, P], Asked], frozenset[str]]:
    """``ask`` by its public name, its help with the options one by one; and the names that arguments may have."""
    found = renamed(ask, name, result)
    signature = inspect.signature(found)
    plain = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    if len(plain) < len(signature.parameters):
        types = _annotations(ask)
        more = [
            inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=types.get(option, "Any")
            )
            for option, value in defaults.items()
        ]
        signature = found.__signature__ = signature.replace(parameters=[*plain, *more])  # type: ignore[attr-defined]
    by_name = (item for item in signature.parameters.values() if item.kind is not inspect.Parameter.POSITIONAL_ONLY)
    return found, frozenset(item.name for item in by_name)


def _check_names(what: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ``TypeError`` for a name that is none of an argument, as Python does."""
    if not given.keys() <= known:
        (name, *_) = (item for item in given if item not in known)
        raise TypeError(f"{what}() got an unexpected keyword argument {name!r}")


def _annotations(ask: Callable[..., Any]) -> dict[str, Any]:
    """The types of options, as they are written where they are declared."""
    kind = ask.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")
    found: dict[str, Any] = {}
    declared: Any = getattr(ask, "__globals__")[kind]  # noqa: B009
    for name, value in declared.__annotations__.items():
        found[name] = getattr(value, "__forward_arg__", value)
    return found
