"""The hooks that a plugin may implement.

A plugin is a module or object named by an entry point of the group ``tilewright.plugins``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from tilewright_kit.contract.device import DeviceProvider
    from tilewright_kit.contract.operation import Operation
    from tilewright_kit.selection.strategies import Strategy

__all__ = ["ENTRY_POINT_GROUP", "HOOK_NAMESPACE", "hookimpl", "hookspec"]

HOOK_NAMESPACE = "tilewright"
ENTRY_POINT_GROUP = "tilewright.plugins"

hookspec = pluggy.HookspecMarker(HOOK_NAMESPACE)
hookimpl = pluggy.HookimplMarker(HOOK_NAMESPACE)


@hookspec
def tilewright_operations() -> Sequence[Operation[Any, Any]]:  # type: ignore[empty-body]
    """Operations that the plugin offers. Called once, when the plugin is loaded."""


@hookspec
def tilewright_devices() -> Sequence[DeviceProvider]:  # type: ignore[empty-body]
    """Kinds of device that the plugin can find and open."""


@hookspec
def tilewright_strategies() -> Sequence[Strategy]:  # type: ignore[empty-body]
    """Selection strategies, under names of their own."""


@hookspec
def tilewright_measurements() -> Sequence[Path]:  # type: ignore[empty-body]
    """Files of measurements (JSON lines, see ``tilewright_kit.selection.measurements``) that the strategies start from.

    The files ``measured/*.jsonl`` beside the plugin's module are found without this hook.
    """


@hookspec
def tilewright_startup(server: Any) -> None:
    """The server is about to take requests. ``server`` has ``settings``, ``operations`` and ``devices``."""


@hookspec
def tilewright_shutdown(server: Any) -> None:
    """The server has answered its last request."""
