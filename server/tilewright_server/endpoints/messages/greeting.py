"""The hello that every client gets with its session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright_kit.types.errors import NotFoundError
from tilewright_proto.v1 import memory_pb2
from tilewright_server import __version__
from tilewright_server.settings import Settings

if TYPE_CHECKING:
    from tilewright_server.engine.engine import Engine

__all__ = ["greeting"]


def greeting(engine: Engine, settings: Settings) -> memory_pb2.SessionEvent.Opened:
    """Limits, devices and operations. Raises ``NotFoundError`` if there is no such device as the settings name."""
    try:
        device = engine.devices.default
    except NotFoundError:
        if settings.device:
            raise
        device = ""  # what needs no device still works
    return memory_pb2.SessionEvent.Opened(
        server_version=__version__,
        inline_limit=settings.inline_limit,
        message_limit=settings.message_limit,
        device=device,
        operations=sorted(engine.operations),
        devices=[
            memory_pb2.DeviceSummary(
                id=info.id,
                kind=info.kind,
                name=info.name,
                uuid=str(info.attributes.get("uuid", "")),
                arch=info.arch.name,
            )
            for info in engine.devices.infos()
        ],
    )
