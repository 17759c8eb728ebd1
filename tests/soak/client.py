"""One client of the soak, a process: ``python -m tests.soak.client KIND TARGET SEED SLOT COUNTS SECONDS``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.soak.actors import Actor, Evictor, Flood, Gpu, Library, Messages, Packets
from tests.soak.counters import Counts
from tests.soak.network import Caller, GpuPackets, Handshakes, KServe, Malformed, Remote, Tls

KINDS: dict[str, type[Actor]] = {
    "packets": Packets,
    "messages": Messages,
    "library": Library,
    "caller": Caller,
    "remote": Remote,
    "tls": Tls,
    "kserve": KServe,
    "malformed": Malformed,
    "evictor": Evictor,
    "flood": Flood,
    "handshakes": Handshakes,
    "gpu": Gpu,
    "gpu packets": GpuPackets,
}


def main() -> None:
    kind, target, seed, slot, path, seconds = sys.argv[1:]
    os.nice(5)
    KINDS[kind](target, int(seed), Counts(Path(path), int(slot)), float(seconds)).run()


if __name__ == "__main__":
    main()
