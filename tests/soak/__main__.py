"""Clients of all kinds against one server: ``python -m tests.soak --minutes 10 --seed 1 --hostile 1000000``.

Clients send packets and messages that are wrong, products that are checked, and floods; some are killed, stopped and
continued; the cache is too small for what is asked of it; the process of a simulated GPU is killed. Meanwhile health is
asked for every second. Prints what the server held at the start and at the end, and ends with 1 if it died, did not
answer, computed anything wrong, said anything without a type, or (in two minutes or more) grew. With ``--hostile`` it
goes on for up to four times as long, until there were so many hostile requests; without these it has failed, too.
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
from tests.soak.servers import Held, cpu_server, gpu_server, held, workers

HEALTH_S = 10.0
"""The longest that an answer about health may take."""
GROWTH = Held(memory_mib=64.0, shared_mib=8.0, descriptors=16, mappings=128, threads=80, processes=4)
"""More than this at the end than at the start is too much. (Threads that answer calls stay once they are started.)"""
STEADY = ("packets", "packets", "packets", "messages", "messages")
PASSING = ("library", "library", "library", "flood", "messages", "packets", "evictor")
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
        self.done: dict[str, int] = dict.fromkeys(("killed", "stopped", "started", "worker killed"), 0)
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
                [sys.executable, "-W", "ignore", "-m", "tests.soak.actors", *arguments], stderr=log
            )
        self.names[actor.pid] = (kind, self.slot)
        self.slot += 1
        self.done["started"] += 1
        self.actors.append((actor, time.monotonic() + self.rng.uniform(1.0, max(1.1, seconds)), fate))

    def check(self, server: subprocess.Popen[str], target: str) -> None:
        """Ask for health; note how long that took."""
        if server.poll() is not None:
            self.faults.append(f"the server ended with status {server.returncode}")
            return
        begin = time.monotonic()
        with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as way:
            try:
                health_pb2_grpc.HealthStub(way).Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_S)
            except grpc.RpcError as error:
                self.faults.append(f"no answer about health: {error.code().name}")  # type: ignore[attr-defined]
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

    def passing(self, target: str) -> None:
        """Start another client of a kind of chance."""
        kind = self.rng.choice(PASSING)
        self.start(kind, target, self.rng.uniform(5, 40), self.rng.choice(("", "kill", "kill", "stop")))

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

    def run(self, server: subprocess.Popen[str], target: str, gpu: tuple[subprocess.Popen[str], str] | None) -> None:
        begin = time.monotonic()
        end = begin + self.seconds
        warm = begin + min(60.0, self.seconds / 5)
        for kind in STEADY:
            self.start(kind, target, self.seconds)
        if gpu is not None:
            self.start("gpu", gpu[1], self.seconds)
        for kind in dict.fromkeys(PASSING):
            self.start(kind, target, warm - begin)
        first: Held | None = None
        next_worker = warm
        while (now := time.monotonic()) < end and server.poll() is None:
            if end - now < 2 and self.hostile < self.wanted and now - begin < (LONGEST - 0.25) * self.seconds:
                end += self.seconds / 4
                for kind in STEADY:
                    self.start(kind, target, end - now)
            self.check(server, target)
            self.tend()
            if first is None and now > warm:
                first = held(server.pid)
                self.said("start", first)
            if len(self.actors) < len(STEADY) + 5 and self.slot < SLOTS and end - now > 5:
                self.passing(target)
            if gpu is not None and now > next_worker:
                next_worker = now + self.rng.uniform(10, 30)
                for worker in workers(gpu[0].pid):
                    worker.kill()
                    self.done["worker killed"] += 1
            time.sleep(max(0.0, min(1.0, end - time.monotonic())))
        self.end()
        time.sleep(REST_S)
        self.check(server, target)
        if gpu is not None and gpu[0].poll() is not None:
            self.faults.append(f"the server with the GPU ended with status {gpu[0].returncode}")
        if server.poll() is None:
            last = held(server.pid)
            self.said("end", last)
            if self.seconds < JUDGED_S:
                sys.stdout.write("too short to tell growth from what is filled once\n")
                return
            for name, before, after, most in zip(Held._fields, first or last, last, GROWTH, strict=True):
                if after - before > most:
                    self.faults.append(f"{name} grew from {before:.0f} to {after:.0f}")

    @property
    def hostile(self) -> int:
        return int(self.counts[:, NAMES.index("hostile")].sum())

    def said(self, when: str, figures: Held) -> None:
        sys.stdout.write(f"{when:6}" + "".join(f"  {n} {v:.0f}" for n, v in figures._asdict().items()) + "\n")
        sys.stdout.flush()

    def report(self, took_s: float) -> int:
        totals: dict[str, Any] = dict(zip(NAMES, self.counts.sum(axis=0).tolist(), strict=True))
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
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as servers:
        folder = chosen.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        server, target = servers.enter_context(cpu_server(folder))
        gpu = None
        try:
            gpu = servers.enter_context(gpu_server(folder))
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            sys.stdout.write(f"without a simulated GPU: {error}\n")
        now = datetime.datetime.now(datetime.timezone.utc)
        sys.stdout.write(
            f"{now:%Y-%m-%d %H:%M} UTC, seed {chosen.seed}, {chosen.minutes:g} minutes, {os.cpu_count()} CPUs\n"
        )
        sys.stdout.flush()
        soak, begin = Soak(chosen.minutes, chosen.seed, folder, chosen.hostile), time.monotonic()
        soak.run(server, target, gpu)
        return soak.report(time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
