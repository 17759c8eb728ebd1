"""Settings of the relay before gRPC and of the pace of large messages: the last rows of the table."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright_server.settings import values as kinds
from tilewright_server.settings.rows import setting as _setting

__all__ = ["Rates"]

KIB = 2**10
MIB = 2**20

_PER = "one process, or over TCP one host,"
"""Senders that each have these rates."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates and bounds of what one process sends and reads. A pair is so many a second, after so many at once."""

    relay_connects: tuple[float, float] = _setting(
        (100.0, 256.0),
        "pair of numbers",
        kinds.pair(kinds.number(1, 1e6)),
        f"Connections that {_PER} may open a second, and at once before that.",
    )
    relay_control: tuple[float, float] = _setting(
        (2000.0, 2000.0),
        "pair of numbers",
        kinds.pair(kinds.number(100, 1e9)),
        f"Frames that carry no call which {_PER} may send a second, and at once.",
    )
    relay_resets: tuple[float, float] = _setting(
        (2000.0, 4000.0),
        "pair of numbers",
        kinds.pair(kinds.number(100, 1e9)),
        f"Frames that cancel a call which {_PER} may send a second, and at once.",
    )
    relay_frames: tuple[float, float] = _setting(
        (250_000.0, 250_000.0),
        "pair of numbers",
        kinds.pair(kinds.number(1000, 1e9)),
        f"Other frames that {_PER} may send a second, and at once.",
    )
    relay_lists: tuple[int, int] = _setting(
        (16 * MIB, 4 * MIB),
        "pair of sizes",
        kinds.pair(kinds.size(64 * KIB, 2**50)),
        f"Bytes of lists of headers, decoded, that {_PER} may send a second, and at once.",
    )
    relay_list_bytes: int = _setting(
        24 * KIB,
        "size",
        kinds.size(8 * KIB, 16 * MIB),
        "Largest list of headers, decoded; a connection that sends a longer one is ended. gRPC itself takes 16 KiB.",
    )
    relay_open_bytes: int = _setting(
        16 * MIB,
        "size",
        kinds.size(64 * KIB, 2**50),
        f"Bytes of lists of headers beyond 1 KiB each that {_PER} may have in calls without an answer.",
    )
    pace_rate: int = _setting(
        256 * MIB,
        "size",
        kinds.size(0, 2**50),
        "Bytes of large messages that one process may send and read a second while others call. 0: any.",
    )
    pace_at_once: int = _setting(
        64 * MIB,
        "size",
        kinds.size(64 * KIB, 2**50),
        "Bytes of large messages that it may send and read at once before that.",
    )
    pace_large_bytes: int = _setting(
        1 * MIB, "size", kinds.size(4 * KIB, 1024 * MIB), "Size from which on a message is a large one."
    )
    pace_long_bytes: int = _setting(
        4 * MIB,
        "size",
        kinds.size(4 * KIB, 1024 * MIB),
        "Size beyond which a message counts for more bytes than it has, by the square of how much longer it is.",
    )
    pace_unread_bytes: int = _setting(
        16 * MIB,
        "size",
        kinds.size(4 * KIB, 2**50),
        "Bytes of replies that one process has not read after which its next large reply waits while others call.",
    )
    pace_company_s: float = _setting(
        5.0,
        "seconds",
        kinds.seconds(0.1, 3600),
        "Time after another process's last call in which a process still keeps to the pace.",
    )
