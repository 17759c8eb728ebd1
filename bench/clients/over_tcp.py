"""Products over TCP and TLS with the relay before gRPC and without it, in turns, from one client.

    python bench/clients/over_tcp.py [--rounds 8]

Starts four servers of its own (with `--cpu-threads 1`), with a certificate made for them. Prints the median time of a
product whose operands are in the message, and the processor time of the server and its processes for each.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import socket
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from serving import serving

import tilewright as tw

CASES = ((64, 150), (512, 40), (1500, 6))
"""Rows of square operands, and calls in a turn."""


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that stands for itself, and its key: of the server, of its client, and of their authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
    made = made.add_extension(x509.BasicConstraints(True, None), True)
    pem = serialization.Encoding.PEM
    files = folder / "own.pem", folder / "own.key"
    files[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return files


def spent(pid: int) -> float:
    """Processor seconds of a process and of its children that live."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") + sum(spent(int(child)) for child in children)


def listener(port: int) -> int:
    """The server that was started to listen at a port."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            if f"127.0.0.1:{port}" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
    raise SystemExit("the server is not found")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as way:
        return int(way.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="turns of each way")
    rounds = parser.parse_args().rounds
    with contextlib.ExitStack() as stack:
        own, key = certificate(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        shown = tw.Tls(ca=own, certificate=own, key=key, server_name="localhost")
        ways = {}
        for tls in (False, True):
            for relay in ("gRPC", "relay"):
                port = free_port()
                more = ["--tls-cert", own, "--tls-key", key, "--tls-client-ca", own] if tls else ["--insecure"]
                flags = (
                    "--listen",
                    f"127.0.0.1:{port}",
                    *(["--no-relay"] if relay == "gRPC" else []),
                    "--cpu-threads",
                    "1",
                    *map(str, more),
                )
                stack.enter_context(serving(*flags))
                client = tw.connect(f"127.0.0.1:{port}", tls=shown if tls else None, timeout=60)
                stack.enter_context(client)
                ways["TLS" if tls else "TCP", relay] = listener(port), client
        for rows, calls in CASES:
            a = np.eye(rows, dtype=np.float32)
            taken, used = defaultdict(list), defaultdict(float)
            for turn in range(rounds + 1):
                for way, (pid, client) in ways.items():
                    before = spent(pid)
                    for _ in range(calls if turn else 1):  # kernels are built in the first
                        start = time.perf_counter()
                        client.gemm(a, a)
                        if turn:
                            taken[way].append(time.perf_counter() - start)
                    used[way] += (spent(pid) - before) * bool(turn)
            for way in ways:
                each, p50 = used[way] / (rounds * calls) * 1e3, np.median(taken[way]) * 1e3
                print(f"{rows:5} {' '.join(way):10} p50 {p50:8.2f} ms   processor {each:8.2f} ms")


if __name__ == "__main__":
    main()
