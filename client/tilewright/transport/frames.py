"""Packets of the local socket: their header and their numbers. See ``local.proto``."""

from __future__ import annotations

from struct import Struct

__all__ = ["HEADER", "MAX_LAUNCHES", "MAX_PARTS", "VERSION"]

HEADER = Struct("<BBHIQ")
"""Kind, flags, slot, sequence, value."""
VERSION = 1
PACKET_BYTES = 65536
MAX_LAUNCHES = 64
"""In one packet."""
MAX_PARTS = 128
"""Descriptors of one packet."""

HELLO, CALL, LAUNCH, ATTACH, OPEN_EVENT, OPEN_SIGNALS, TRACE, REQUEST = 1, 2, 3, 4, 5, 6, 7, 8
"""Kinds. A reply has ``REPLIED`` besides."""
CONTEXT_BYTES = 1008
"""The longest payload of ``TRACE``."""
REPLIED = 0x80
FAILED = 1
"""Flag of a reply: its payload is an ``ErrorDetail``."""
TIED = 2
"""Flag of the reply to a launch that failed: what its flags say of this process' stream was done all the same."""

METHODS = (
    "",
    "RegisterRegion",
    "Bind",
    "Unbind",
    "ExportBuffer",
    "UnregisterRegion",
    "FetchObject",
    "OpenLaunchPage",
)
"""Names of methods of ``CALL``, at their numbers."""
REGISTER_REGION, BIND, UNBIND, EXPORT_BUFFER, UNREGISTER_REGION, FETCH_OBJECT, OPEN_LAUNCH_PAGE = 1, 2, 3, 4, 5, 6, 7
"""Methods of ``CALL``."""

WAIT, RECORD, REPLY, TIME = 1, 2, 4, 8
"""Flags of a launch."""
