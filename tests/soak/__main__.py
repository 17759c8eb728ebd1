"""Clients of all kinds against one server: ``python -m tests.soak --minutes 10 --seed 1 --hostile 1000000``.

Clients send packets and messages that are wrong, products that are checked, and floods, over Unix sockets, TCP and TLS,
to the service's own protocol and to the Open Inference Protocol, with shared memory and without; some launch in their
own processes; some are killed, stopped and continued; the cache is too small for what is asked of it; the process of a
simulated GPU is killed, and its driver is reset. Meanwhile health is asked for every second. Prints what the servers
held at the start and at the end, and ends with 1 if one died, did not answer, computed anything wrong, said anything
without a type, or (in two minutes or more) grew. With ``--hostile`` it goes on for up to four times as long, until
there were so many hostile requests; without these it has failed, too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.soak.counters import NAMES, SLOTS, all_counts
from tests.soak.servers import Held, Served, cpu_server, gpu_server, held, reset_driver, tls_server, workers

HEALTH_S = 10.0
"""The longest that an answer about health may take."""
GROWTH = Held(memory_mib=64.0, shared_mib=8.0, descriptors=16, mappings=128, threads=80, processes=4)
"""More than this at the end than at the start is too much. (Threads that answer calls stay once they are started.)"""
STEADY = ("packets", "packets", "packets", "messages", "malformed")
"""Clients of the whole run. (``messages`` by a Unix socket and over TCP in turns.)"""
PASSING = (
    *("library", "library", "caller", "remote", "tls", "kserve", "kserve", "flood", "handshakes"),
    *("messages", "packets", "malformed", "evictor"),
)
GPU = ("gpu", "gpu packets")
JUDGED_S = 120.0
"""Shorter runs say nothing about growth: kernels, plans and threads that stay are still coming."""
LONGEST = 4
"""Times the length of a run that it may take for its hostile requests."""
REST_S = 15.0
"""Time in which nobody asks for anything, before the end is looked at."""


class Soak:
    """One run."""

    def __init__(self, minutes: float, seed: int, folder: Path, hostile: int = 0) -> None:
        self.rng = random.Random(seed)
        self.seconds = minutes * 60
        self.wanted = hostile
        self.folder = folder
        self.path = folder / "counts"
        self.counts = all_counts(self.path, create=True)
        self.slot = 0
        self.actors: list[tuple[subprocess.Popen[bytes], float, str]] = []
        """Process, when something is done to it, and what."""
        self.done: dict[str, int] = dict.fromkeys(("killed", "stopped", "started", "worker killed", "driver reset"), 0)
        self.names: dict[int, tuple[str, int]] = {}
        """Kind and slot of the actor of a process id."""
        self.slowest_s = 0.0
        self.faults: list[str] = []

    def log(self, slot: int) -> Path:
        return self.folder / f"actor-{slot}.log"

    def fell(self, actor: subprocess.Popen[bytes]) -> str:
        """Text on an actor that failed, with the end of its log."""
        kind, slot = self.names[actor.pid]
        last = self.log(slot).read_text(errors="replace").splitlines()[-12:]
        return "\n    ".join((f"a client ({kind}) ended with status {actor.returncode}:", *last))

    def start(self, kind: str, target: str, seconds: float, fate: str = "") -> None:
        arguments = [kind, target, str(self.rng.randrange(1 << 31)), str(self.slot), str(self.path), str(seconds)]
        with self.log(self.slot).open("wb") as log:
            actor = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.soak.client", *arguments], stderr=log
            )
        self.names[actor.pid] = (kind, self.slot)
        self.slot += 1
        self.done["started"] += 1
        self.actors.append((actor, time.monotonic() + self.rng.uniform(1.0, max(1.1, seconds)), fate))

    def check(self, server: Served) -> None:
        """Ask for health; note how long that took."""
        if server.process.poll() is not None:
            self.faults.append(f"the server ({server.name}) ended with status {server.process.returncode}")
            return
        begin = time.monotonic()
        with server.channel as way:
            try:
                health_pb2_grpc.HealthStub(way).Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S)
            except grpc.RpcError as error:
                code = error.code().name  # type: ignore[attr-defined]
                self.faults.append(f"no answer about health ({server.name}): {code}")
        self.slowest_s = max(self.slowest_s, time.monotonic() - begin)

    def tend(self) -> None:
        """Kill, stop and continue actors whose time has come; forget those that have ended."""
        now, kept = time.monotonic(), []
        for actor, when, fate in self.actors:
            if actor.poll() is not None:
                if actor.returncode not in (0, -signal.SIGKILL):
                    self.faults.append(self.fell(actor))
                continue
            if fate and now > when:
                if fate == "kill":
                    actor.kill()
                    self.done["killed"] += 1
                elif fate == "stop":
                    actor.send_signal(signal.SIGSTOP)
                    self.done["stopped"] += 1
                    kept.append((actor, now + self.rng.uniform(0.5, 8.0), self.rng.choice(("continue", "kill"))))
                    continue
                else:
                    actor.send_signal(signal.SIGCONT)
                fate = ""
            kept.append((actor, when, fate))
        self.actors = kept

    def passing(self, servers: dict[str, Served]) -> None:
        """Start another client of a kind of chance."""
        kind = self.rng.choice(PASSING)
        fate = self.rng.choice(("", "kill", "kill", "stop"))
        self.start(kind, self.target(kind, servers), self.rng.uniform(5, 40), fate)

    def target(self, kind: str, servers: dict[str, Served]) -> str:
        """Where a client of a kind calls."""
        cpu = servers["cpu"]
        if kind in GPU:
            return servers["gpu"].target
        if kind in ("tls", "handshakes"):
            return servers["tls"].target
        over_tcp = kind == "remote" or (kind in ("messages", "kserve", "malformed") and self.rng.random() < 0.5)
        return cpu.remote if over_tcp else cpu.target

    def end(self) -> None:
        """Wait for all that run still, and end those that do not."""
        until = time.monotonic() + 60
        while self.actors and time.monotonic() < until:
            for actor, _, _ in self.actors:
                with contextlib.suppress(ProcessLookupError):
                    actor.send_signal(signal.SIGCONT)
            self.tend()
            time.sleep(0.2)
        for actor, _, _ in self.actors:
            self.faults.append("a client did not end")
            actor.kill()
        for pid in self.names:  # what those had shared that were killed
            for left in Path("/dev/shm").glob(f"tw-soak-{pid}-*"):
                left.unlink(missing_ok=True)

    def run(self, servers: dict[str, Served]) -> None:
        begin = time.monotonic()
        end = begin + self.seconds
        warm = begin + min(60.0, self.seconds / 5)
        lasting = [*STEADY, *(GPU if "gpu" in servers else ())]
        for kind in lasting:
            self.start(kind, self.target(kind, servers), self.seconds)
        for kind in dict.fromkeys(PASSING):
            self.start(kind, self.target(kind, servers), warm - begin)
        first: dict[str, Held] = {}
        next_loss = warm
        while (now := time.monotonic()) < end and all(item.process.poll() is None for item in servers.values()):
            if end - now < 2 and self.hostile < self.wanted and now - begin < (LONGEST - 0.25) * self.seconds:
                end += self.seconds / 4
                for kind in lasting:
                    self.start(kind, self.target(kind, servers), end - now)
            for server in servers.values():
                self.check(server)
            self.tend()
            if not first and now > warm:
                first = {name: held(server.process.pid) for name, server in servers.items()}
                self.said("start", first)
            if len(self.actors) < len(lasting) + 5 and self.slot < SLOTS and end - now > 5:
                self.passing(servers)
            if "gpu" in servers and now > next_loss:
                next_loss = now + self.rng.uniform(10, 30)
                self.lose(servers["gpu"])
            time.sleep(max(0.0, min(1.0, end - time.monotonic())))
        self.end()
        time.sleep(REST_S)
        for server in servers.values():
            self.check(server)
        if all(item.process.poll() is None for item in servers.values()):
            last = {name: held(server.process.pid) for name, server in servers.items()}
            self.said("end", last)
            self.judge(first, last)

    def lose(self, gpu: Served) -> None:
        """Take the device from its server: its process is killed, or its driver reset."""
        if self.rng.random() < 0.5:
            reset_driver(self.folder)
            self.done["driver reset"] += 1
            return
        for worker in workers(gpu.process.pid):
            worker.kill()
            self.done["worker killed"] += 1

    def judge(self, first: dict[str, Held], last: dict[str, Held]) -> None:
        if self.seconds < JUDGED_S:
            sys.stdout.write("too short to tell growth from what is filled once\n")
            return
        for server, before in first.items():
            for name, was, now, most in zip(Held._fields, before, last[server], GROWTH, strict=True):
                if now - was > most:
                    self.faults.append(f"{name} ({server}) grew from {was:.0f} to {now:.0f}")

    @property
    def hostile(self) -> int:
        return int(self.counts[:, NAMES.index("hostile")].sum())

    def unheard(self) -> list[str]:
        """Kinds of clients that made requests, of which none was answered: they looked at nothing."""
        answered = dict.fromkeys((kind for kind, _ in self.names.values()), 0)
        for kind, slot in self.names.values():
            answered[kind] += int(self.counts[slot, NAMES.index("answered")])
        return [kind for kind, count in answered.items() if not count and kind != "handshakes"]

    def said(self, when: str, figures: dict[str, Held]) -> None:
        for server, item in figures.items():
            text = "".join(f"  {name} {value:.0f}" for name, value in item._asdict().items())
            sys.stdout.write(f"{when:6}{server:5}{text}\n")
        sys.stdout.flush()

    def report(self, took_s: float) -> int:
        totals: dict[str, Any] = dict(zip(NAMES, self.counts.sum(axis=0).tolist(), strict=True))
        self.faults += [f"no client ({kind}) was ever answered" for kind in self.unheard()]
        for name in ("wrong", "untyped"):
            if totals[name]:
                self.faults.append(f"{totals[name]} {name}")
        if totals["hostile"] < self.wanted:
            self.faults.append(f"{totals['hostile']:,} hostile requests are less than {self.wanted:,}")
        counted = ", ".join(f"{name} {count:,}" for name, count in (totals | self.done).items())
        sys.stdout.write(f"{counted}\n{took_s:.0f} s; slowest answer about health {self.slowest_s * 1000:.0f} ms\n")
        for fault in dict.fromkeys(self.faults):
            sys.stdout.write(f"FAULT: {fault}\n")
        sys.stdout.write("failed\n" if self.faults else "passed\n")
        return 1 if self.faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--hostile", type=int, default=0, help="hostile requests that there must be")
    parser.add_argument("--keep", type=Path, help="folder for the logs, which stay")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as ends:
        folder = chosen.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        served = {"cpu": ends.enter_context(cpu_server(folder)), "tls": ends.enter_context(tls_server(folder))}
        try:
            served["gpu"] = ends.enter_context(gpu_server(folder))
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            sys.stdout.write(f"without a simulated GPU: {error}\n")
        now = datetime.datetime.now(datetime.timezone.utc)
        sys.stdout.write(
            f"{now:%Y-%m-%d %H:%M} UTC, seed {chosen.seed}, {chosen.minutes:g} minutes, {os.cpu_count()} CPUs\n"
        )
        sys.stdout.flush()
        soak, begin = Soak(chosen.minutes, chosen.seed, folder, chosen.hostile), time.monotonic()
        soak.run(served)
        return soak.report(time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
