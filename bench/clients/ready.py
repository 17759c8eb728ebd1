"""Time until a pod's server is ready with a warm bundle, as its probe sees it.

    python bench/clients/ready.py [--starts 8] [--gemm decode] [--image localhost/tilewright:cpu [--runtime runc]]

Makes a bundle and its kernels in a cache, as an image has them, then starts servers with both: from `exec` until
`/readyz` answers 200, asked every 10 ms. Beside it the same without a bundle, in turns. Times are of the clock, and of
the processors (all threads of the server until then), which other programs on the machine disturb less.

With an image (`deploy/container/build.sh cpu`), from `podman run` until then: its root read-only, without rights, its
caches in a folder outside, as of a volume, and the network the machine's. Beside it a container that runs `true`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from protocol_cost import cpu_of

PORT = 19465
TILEWRIGHT = (sys.executable, "-m", "tilewright_tools.cli")
LIMIT_S = 120.0
USER = 10001
"""User of the image."""
CACHE = "/var/cache/tilewright"
"""Folder of the image's caches."""


def is_ready() -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=5) as reply:
        return bool(reply.status == 200)
    return False


def start(folder: Path, *flags: str) -> tuple[float, float]:
    """Seconds of the clock and of processors until a server is ready."""
    listen = ("--listen", f"unix:{folder}/s.sock", "--http-listen", str(PORT), "--cache-dir", str(folder / "cache"))
    flags = (*flags, "--log-level", "warning")
    begin = time.monotonic()
    process = subprocess.Popen((*TILEWRIGHT, "serve", *listen, *flags), stdout=subprocess.DEVNULL, stderr=2)
    try:
        while not is_ready():
            if process.poll() is not None or time.monotonic() - begin > LIMIT_S:
                raise SystemExit("the server did not become ready")
            time.sleep(0.01)
        return time.monotonic() - begin, cpu_of(process.pid)
    finally:
        process.terminate()
        process.wait()


def make_bundle(folder: Path, problems: str) -> Path:
    bundle = folder / "warm.twb"
    words = ("bundle", "build", "--gemm", problems, "--dtype", "fp32", "--cache-dir", str(folder / "cache"))
    subprocess.run((*TILEWRIGHT, *words, "--output", str(bundle)), check=True)
    return bundle


@dataclass(frozen=True)
class Image:
    """An image of the server, and the folder that its containers have for their caches."""

    name: str
    folder: Path
    podman: tuple[str, ...]

    def command(self, *options: str) -> tuple[str, ...]:
        safe = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=host")
        limits = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
        return (*self.podman, "run", *safe, *limits, f"--volume={self.folder}:/var/cache/tilewright", *options)

    def make_bundle(self, problems: str) -> None:
        """Kernels and a bundle of the image's own compiler."""
        os.chown(self.folder, USER, USER)
        words = ("bundle", "build", "--gemm", problems, "--dtype", "fp32", "--cache-dir", f"{CACHE}/kernels")
        subprocess.run(
            (*self.command("--rm"), self.name, *words, "--output", f"{CACHE}/warm.twb"),
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def start(self, *flags: str) -> tuple[float, float]:
        """Seconds of the clock until a container's server is ready, and of the processors that its processes took."""
        container = f"tilewright-ready-{time.monotonic_ns()}"
        serve = ("serve", "--http-listen", str(PORT), "--listen", f"unix:{CACHE}/s/s.sock", "--log-level", "warning")
        begin = time.monotonic()
        command = (*self.command("--detach", f"--name={container}"), self.name, *serve, *flags)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        try:
            while not is_ready():
                if time.monotonic() - begin > LIMIT_S:
                    raise SystemExit("the server did not become ready")
                time.sleep(0.01)
            took = time.monotonic() - begin
            return took, sum(map(cpu_of, self._processes(container)))
        finally:
            subprocess.run((*self.podman, "rm", "--force", container), check=True, stdout=subprocess.DEVNULL)

    def _processes(self, container: str) -> list[int]:
        """All processes of a container."""
        show = (*self.podman, "inspect", "--format", "{{.State.Pid}}", container)
        found = [int(subprocess.run(show, check=True, capture_output=True, text=True).stdout)]
        for pid in found:  # which grows
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return found

    def nothing(self) -> tuple[float, float]:
        """Seconds of the clock that a container takes to run `true`; its processors are not looked at."""
        begin = time.monotonic()
        subprocess.run((*self.command("--rm", "--entrypoint=true"), self.name), check=True)
        return time.monotonic() - begin, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--gemm", default="decode", help="problems of the bundle, as `tilewright bundle build` takes")
    parser.add_argument("--image", help="start containers of an image instead of processes")
    parser.add_argument("--runtime", help="podman's runtime")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if given.image:
            image = Image(given.image, folder, ("podman", *(("--runtime", given.runtime) if given.runtime else ())))
            image.make_bundle(given.gemm)
            ways = {
                "a container of `true`": image.nothing,
                "without a bundle": image.start,
                "with a warm bundle": partial(image.start, "--bundle", f"{CACHE}/warm.twb"),
            }
        else:
            bundle = make_bundle(folder, given.gemm)
            ways = {
                "without a bundle": partial(start, folder),
                "with a warm bundle": partial(start, folder, "--bundle", str(bundle)),
            }
        for begin in ways.values():  # what only the first start does
            begin()
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(given.starts):
            for way, begin in ways.items():
                found[way].append(begin())
    for way, starts in found.items():
        clock, processors = zip(*starts, strict=True)
        print(
            f"{way:22} ready after {min(clock):.2f} s at the least, {statistics.median(clock):.2f} in the middle, "
            f"{max(clock):.2f} at most; processor time {min(processors):.2f} s at the least"
        )


if __name__ == "__main__":
    main()
