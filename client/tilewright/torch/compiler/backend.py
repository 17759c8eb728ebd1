"""``torch.compile(model, backend="tilewright")``: products, convolutions and attention by Tilewright where it is
faster, everything else by another backend, as a rule inductor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright.errors import InvalidArgumentError, UnavailableError
from tilewright.torch.compiler.choice import decide
from tilewright.torch.compiler.graph import problem_at, replace, value_of

__all__ = ["tilewright"]

_CHOICES = ("measured", "always")


def tilewright(
    model: Any, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """A compiled graph. ``mode`` and ``options`` are inductor's, and of ours: ``options["choose"]`` is "measured", or
    "always" to take Tilewright for whatever it can do; ``options["rest"]`` names the backend of everything else.
    """
    more = dict(options or {})
    choose, rest = more.pop("choose", "measured"), more.pop("rest", "inductor")
    if choose not in _CHOICES:
        raise InvalidArgumentError(
            f"there is no choice {choose!r}",
            field="options.choose",
            value=choose,
            rule="torch_choice",
            fix="use measured or always",
        )
    gone: set[Any] = set()
    try:
        for node in list(model.graph.nodes):
            found = None if node in gone else problem_at(node)
            if found is None:
                continue
            values = [None if item is None else value_of(item) for item in found.operands]
            if decide(found.kind, values, found.words, choose == "always"):
                replace(model.graph, found)
                gone.update(found.nodes)
    except UnavailableError as error:
        warnings.warn(f"nothing is left to Tilewright: {error}", stacklevel=2)
    model.recompile()
    return _compiled(rest, model, inputs, mode, more)


def _compiled(rest: str, model: Any, inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any]) -> Any:
    if rest != "inductor":
        return torch._dynamo.lookup_backend(rest)(model, list(inputs))
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **options}
    return compile_fx(model, list(inputs), config_patches=patches)
