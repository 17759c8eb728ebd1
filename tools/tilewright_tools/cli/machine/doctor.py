"""`tilewright doctor`: what this machine has, what it lacks, and how to get it."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from tilewright_tools.cli.console.exits import Exit
from tilewright_tools.cli.console.output import examples, note, out, print_json

__all__ = ["EPILOG", "Finding", "doctor", "examine"]

EPILOG = examples(
    "tilewright doctor",
    "tilewright doctor --json | jq '.[] | select(.state != \"ok\")'",
    "tilewright doctor --deep --device hip:0",
)

_PACKAGES = ("grpcio", "protobuf", "numpy", "ml_dtypes", "pluggy", "typer", "rich")
_FLEET_S = 10.0
"""For one access to the fleet's storage: the first one of S3's client connects and asks for credentials."""
_START_S = 120.0
"""Until the private server of a self-test is ready: devices are opened and probed first."""
_STYLES = {"ok": "green", "missing": "bold red", "note": "yellow"}


@dataclass(frozen=True)
class Finding:
    """One line. ``state`` is ok, missing (the server cannot work without it) or note (optional, or worth knowing)."""

    topic: str
    state: str
    detail: str
    fix: str = ""


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    target: str = typer.Option("", "--target", help="A server that is to be there."),
    deep: bool = typer.Option(False, "--deep", help="Test a device for some minutes, and write a report to send."),
    device: str = typer.Option("", "--device", help="With --deep: the device. Default: the server's."),
    report: Path = typer.Option(Path("tilewright-report.json"), "--report", help="With --deep: the report's file."),
    seconds: float = typer.Option(300.0, "--seconds", min=1.0, help="With --deep: no test is begun after that."),
) -> None:
    """Look at Python, CPU, devices, compiler, cache and sockets; exit code 4 if something needed is missing, 3 if the
    server of --target does not serve. With --deep kernels, memory, order and faults of a device are tested through a
    server: exit code 1 if one fails.
    """
    from tilewright_tools.cli.private_server import is_serving

    findings = list(examine())
    if deep:
        _test(findings, target, device, report, seconds, as_json)
        return
    absent = target and not is_serving(_normal(target))
    if target:
        fix = f"tilewright serve --listen {target}" if absent else ""
        detail = f"none serves at {target}" if absent else f"one serves at {target}"
        findings.append(Finding("asked for", "missing" if absent else "ok", detail, fix))
    missing = [item for item in findings if item.state == "missing"]
    if as_json:
        print_json([asdict(item) for item in findings])
    else:
        from rich.table import Table
        from rich.text import Text

        grid = Table(show_header=False, box=None, padding=(0, 1))
        for item in findings:
            detail = item.detail + (f"\nFix: {item.fix}" if item.fix else "")
            grid.add_row(Text(item.topic, "bold"), Text(item.state, _STYLES[item.state]), Text(detail))
        out().print(grid)
        note(f"{len(missing)} things are missing" if missing else "Nothing needed is missing.")
    if missing:
        raise typer.Exit(Exit.UNAVAILABLE if absent and len(missing) == 1 else Exit.MISSING)


def _test(findings: list[Finding], target: str, device: str, report: Path, seconds: float, as_json: bool) -> None:
    """Run the self-test, write its report and show it. Exits with 1 if a test failed."""
    import time
    from contextlib import ExitStack

    from tilewright_tools.cli.console.output import table
    from tilewright_tools.cli.machine.self_test import self_test
    from tilewright_tools.cli.private_server import PrivateServer, connected

    with ExitStack() as stack:
        server = None
        if not target:
            server = PrivateServer(["--device", device] if device else [], timeout=_START_S)
            target = stack.enter_context(server)
        with connected(target) as client:
            device = device or client.session.devices[0].id
        outcomes = []
        for outcome in self_test(target, device, seconds):
            outcomes.append(outcome)
            if not as_json:
                note(f"{outcome.state:8} {outcome.topic}: {outcome.detail}")
        log = server.log_tail() if server is not None else ""
    failed = [item for item in outcomes if item.state == "failed"]
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": device,
        "ok": not failed,
        "machine": [asdict(item) for item in findings],
        "tests": [asdict(item) for item in outcomes],
        "server_log": log,
    }
    report.write_text(json.dumps(record, indent=1) + "\n")
    if as_json:
        print_json(record)
    else:
        counts = [(state, sum(item.state == state for item in outcomes)) for state in ("ok", "failed", "skipped")]
        table("", ("tests", device), counts)
        note(f"the report is {report}")
    if failed:
        raise typer.Exit(Exit.FAILED)


def _normal(target: str) -> str:
    from tilewright.session.settings import normalise_target

    return normalise_target(target)


def examine() -> Iterator[Finding]:
    """All findings, in the order in which one depends on another. Never raises."""
    kinds: set[str] = set()
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "python": _python,
        "cpu": _cpu,
        "plugins": partial(_plugins, kinds),
        "compiler": partial(_toolchain, kinds),
        "cuda compiler": _cuda_toolchain,
        "hip compiler": _hip_toolchain,
        "disassembler": _disassembler,
        "cache": _cache,
        "fleet": _fleet,
        "shared memory": _memory,
        "sockets": _sockets,
        "limits": _limits,
    }
    for topic, look in looks.items():
        try:
            yield from look()
        except Exception as error:  # one broken part must not hide the others
            fix = getattr(error, "fix", "")
            yield Finding(topic, "missing", str(getattr(error, "reason", "") or error), fix)


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", "missing", f"{name} is not installed", "pip install 'tilewright[server]'")
    yield Finding("packages", "ok", ", ".join(found))


def _cpu() -> Iterator[Finding]:
    import tilewright_arch

    spec = tilewright_arch.detect_cpu()
    caches = spec.caches
    sizes = "/".join(f"{size >> 10}" for size in (caches.l1_bytes, caches.l2_bytes, caches.l3_bytes))
    yield Finding("cpu", "ok", f"{spec.id}, {len(os.sched_getaffinity(0))} cores, caches {sizes} KiB")


def _plugins(kinds: set[str]) -> Iterator[Finding]:
    """Adds the kinds of devices that can be used to ``kinds``."""
    import logging

    from tilewright_kit.loading.loader import PluginManager

    logging.getLogger("tilewright_kit.loading.loader").setLevel(logging.CRITICAL)
    manager = PluginManager()
    manager.load_entry_points()
    names = ", ".join(f"{item.name} {item.version}".strip() for item in manager.loaded)
    yield Finding(
        "plugins", "ok" if manager.loaded else "missing", names or "none", "" if names else "pip install tilewright"
    )
    for failure in manager.failures:
        yield Finding("plugins", "note", f"{failure.name} does not work: {failure.reason}")
    for kind, provider in manager.devices.items():
        devices = provider.discover()
        kinds.update(info.kind for info in devices)
        for info in devices:
            memory = f", {info.memory_bytes / 2**30:.0f} GiB" if info.memory_bytes else ""
            yield Finding("device", "ok", f"{info.id}: {info.name}, {info.arch.id}, {info.units} units{memory}")
        if not devices:
            yield Finding("device", "note", f"no {kind} device")
        for topic, text in provider.diagnose().items():
            # What is wrong with a kind of device says how to mend it.
            detail, _, fix = text.partition(" Fix: ")
            state = "note" if fix or topic.startswith("note") else "ok"
            yield Finding(f"{kind} {topic}", state, detail, fix)
    if not kinds:
        yield Finding(
            "device", "missing", "no device of any kind can be used", "the lines above say what each kind lacks"
        )


def _toolchain(kinds: set[str]) -> Iterator[Finding]:
    """``kinds`` are those of usable devices: for GPUs no C++ compiler is needed."""
    from tilewright_kit.types.errors import ToolchainMissingError
    from tilewright_native import include_dir
    from tilewright_server.build.toolchains.toolchain import CpuToolchain

    try:
        yield Finding("compiler", "ok", CpuToolchain([include_dir()]).describe())
    except ToolchainMissingError as error:
        if not kinds - {"cpu"}:
            raise
        yield Finding("compiler", "note", f"{error.reason}: nothing runs on the CPU", error.fix)


def _cuda_toolchain() -> Iterator[Finding]:
    from tilewright_kit.types.errors import ToolchainMissingError
    from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain

    toolchain = NvrtcToolchain([])
    try:
        yield Finding("cuda compiler", "ok", toolchain.describe())
    except ToolchainMissingError as error:
        yield Finding("cuda compiler", "note", error.reason, error.fix)
    finally:
        toolchain.close()


def _hip_toolchain() -> Iterator[Finding]:
    from tilewright_kit.types.errors import ToolchainMissingError
    from tilewright_server.build.toolchains.hip import HipToolchain
    from tilewright_server.settings import load

    toolchain = HipToolchain([], compiler=load().hip_compiler)
    try:
        yield Finding("hip compiler", "ok", toolchain.describe())
    except ToolchainMissingError as error:
        why = f" ({'; '.join(error.log_tail.splitlines())})" if error.log_tail else ""
        yield Finding("hip compiler", "note", f"{error.reason}{why}", error.fix)
    finally:
        toolchain.close()


def _disassembler() -> Iterator[Finding]:
    """Needed for the analysis of AMD GPUs' kernels only."""
    from tilewright_kit.types.errors import ToolchainMissingError
    from tilewright_server.settings import load
    from tilewright_tools.analysis.disassembly import Disassembler

    try:
        yield Finding("disassembler", "ok", str(Disassembler(load().llvm_objdump).find()))
    except ToolchainMissingError as error:
        yield Finding("disassembler", "note", f"{error.reason}: kernels of AMD GPUs cannot be analysed", error.fix)


def _cache() -> Iterator[Finding]:
    from tilewright_server.build.cache import maintenance
    from tilewright_tools.cli.machine.cache import open_cache, size_text

    cache = open_cache(None)
    entries = maintenance.list_entries(cache)
    used, limit = size_text(sum(entry.nbytes for entry in entries)), size_text(cache.max_bytes)
    yield Finding("cache", "ok", f"{cache.root}: {len(entries)} kernels, {used} of {limit}")
    status = os.statvfs(cache.root)
    free = status.f_bavail * status.f_frsize
    if free < 256 << 20:
        yield Finding(
            "cache", "note", f"only {size_text(free)} free on its disk", "tilewright cache prune, or free space"
        )


def _fleet() -> Iterator[Finding]:
    """The storage that servers share, if the settings name one."""
    import secrets

    from tilewright_kit.types.errors import TilewrightError
    from tilewright_server.settings import load

    settings = load()
    if not settings.fleet:
        return
    from tilewright_server.hosting.fleet.seal import Seal
    from tilewright_server.hosting.fleet.store import Store

    name = f"probes/{secrets.token_hex(8)}"
    try:
        store = Store(settings.fleet, max(settings.fleet_timeout_s, _FLEET_S))
        seal = Seal(settings.fleet_key, settings.trusted_keys)
        if settings.fleet_write:
            store.write(name, seal.close(b"probe"))
        found = store.read(name, 4096)
        if found is None:
            detail = "reached; this server does not write there"
            if settings.fleet_write:
                yield Finding("fleet", "note", f"{settings.fleet}: what was written is not there")
                return
        else:
            seal.open(found)
            store.remove(name)
            detail = "read and written"
    except TilewrightError as error:
        yield Finding("fleet", "note", error.reason, error.fix)
        return
    yield Finding("fleet", "ok", f"{settings.fleet}: {detail}")


def _memory() -> Iterator[Finding]:
    """Clients hand over memory files; the server opens them through the process table and makes no page of theirs."""
    from tilewright_server.memory.shm import Mapping

    fd = os.memfd_create("tilewright-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, 4096)
        with Path(f"/proc/{os.getpid()}/fd/{fd}").open("r+b"):
            pass
        mapping = Mapping(fd, 4096)
        guarded = mapping.is_guarded
        mapping.close()
        if guarded:
            yield Finding("shared memory", "ok", "sealed memory files work; pages that clients take away stay away")
        else:
            detail = "sealed memory files work; pages that clients take away are made anew, and charged to the server"
            yield Finding("shared memory", "note", detail, "allow userfaultfd(2), and build libtilewright (make setup)")
    except OSError as error:
        yield Finding(
            "shared memory",
            "note",
            f"memory files cannot be handed over: {error}",
            "mount /proc; operands go inline until then",
        )
    finally:
        os.close(fd)


def _sockets() -> Iterator[Finding]:
    from tilewright.session.settings import default_target
    from tilewright_server.settings import default_listen
    from tilewright_tools.cli.private_server import is_listening, is_serving

    for target in dict.fromkeys((default_target(), default_listen())):
        if is_serving(target):
            yield Finding("server", "ok", f"one serves at {target}")
        elif is_listening(target):
            yield Finding("server", "note", f"something listens at {target}, but does not say that it is healthy")
        else:
            yield Finding("server", "note", f"none at {target}", "tilewright serve")
    path = Path(default_listen().removeprefix("unix:"))
    folder = next(parent for parent in path.parents if parent.exists())
    if not os.access(folder, os.W_OK):
        fix = f"tilewright serve --listen unix:{tempfile.gettempdir()}/tilewright.sock"
        yield Finding("socket", "missing", f"{folder} cannot be written, so no socket can be made there", fix)


def _limits() -> Iterator[Finding]:
    from tilewright_server.hosting.limits import fitted, process_limits
    from tilewright_server.settings import load

    limits = process_limits()
    _, lowered = fitted(load(), limits)
    fix = "raise the limits (ulimit -u, -n, -v, or the container's), or leave the server as small as that"
    detail = "; ".join([limits.describe(), *lowered])
    yield Finding("limits", "note" if lowered else "ok", detail, fix if lowered else "")
