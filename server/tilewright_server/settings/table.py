"""Table of all settings of the server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_server.settings import values as kinds
from tilewright_server.settings.rates import Rates
from tilewright_server.settings.rows import ENV_PREFIX, Setting
from tilewright_server.settings.rows import setting as _setting

__all__ = ["ENV_PREFIX", "MIB", "TABLE", "Setting", "Settings"]

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Settings(Rates):
    """Checked settings of one server. Build it with ``load``, or directly in tests."""

    listen: tuple[str, ...] = _setting(
        (),
        "addresses",
        kinds.words,
        "Where to listen: `unix:PATH`, or `HOST:PORT`, which is beyond loopback for TLS only."
        " Empty: `tilewright/tilewright.sock` in the user's runtime directory.",
    )
    insecure: bool = _setting(
        False, "flag", kinds.flag, "Allow TCP listeners without TLS, which any local user can reach."
    )
    insecure_network: bool = _setting(
        False, "flag", kinds.flag, "Together with `insecure`: also on addresses that other machines reach."
    )
    tls_cert: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "Certificate chain of TCP listeners, in PEM form; read anew when it changes. Empty: no TLS.",
    )
    tls_key: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "Key of `tls_cert`, in PEM form and without a password.",
    )
    tls_client_ca: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "Authorities of the certificates of clients, which are then required. Empty: clients need none.",
    )
    tls_crl: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "Revocation list of these authorities (extra `tls`).",
    )
    policy: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "Policy file (TOML): principals, how they prove who they are, and their roles.",
    )
    audit_log: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "File of who did what, with which result: sessions, builds, registered kernels, refusals; JSON lines.",
    )
    socket_mode: str = _setting(
        "600",
        "mode",
        kinds.choice("600", "660", "666"),
        "Mode of Unix sockets: the server's user, his group too, or everybody who reaches the folder.",
    )
    socket_group: str = _setting(
        "", "group", kinds.text, "Group of Unix sockets, by name or number. Empty: that of the process or the folder."
    )
    allowed_uids: tuple[int, ...] = _setting(
        (), "names", kinds.uids, "Users besides the server's own and root who may use the local socket, by number."
    )
    device: str = _setting(
        "",
        "name",
        kinds.text,
        "Default device by id, for example `cpu:0`; a server without that device does not start."
        " Empty: the first GPU, or else the CPU.",
    )
    mps: str = _setting(
        "off",
        "choice",
        kinds.choice("off", "auto", "require"),
        "NVIDIA's Multi-Process Service for processes of GPUs: `auto` uses a daemon that runs for this user, or starts"
        " one that ends with the server; `require` does not start without.",
    )
    plugins: tuple[str, ...] = _setting((), "names", kinds.words, "Plugins to load. Empty: all that are installed.")
    disabled_plugins: tuple[str, ...] = _setting((), "names", kinds.words, "Plugins not to load.")
    cpu_arch: str = _setting(
        "", "name", kinds.text, "CPU level to make kernels for, for example `x86-64-v2`. Empty: the machine's."
    )
    cpu_threads: int = _setting(0, "count", kinds.count(0, 4096), "Threads of the CPU device. 0: all usable cores.")
    cpu_isolated: bool = _setting(
        False,
        "flag",
        kinds.flag,
        "Run kernels of the CPU in a process of their own, as those of GPUs are. A fault in one then ends that process"
        " only; operands in shared memory are copied, unless they are registered with that device.",
    )
    strategy: str = _setting(
        "auto",
        "name",
        kinds.text,
        "Selection strategy of requests that name none. `auto` goes by measurements where the device's kind was"
        " measured, else by the model; `frozen` does so once for each problem and keeps the choice in"
        " `selection_lock`; with `batch_invariant` a row's result does not depend on the number of rows.",
    )
    selection_lock: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "File of the choices that the strategy `frozen` has made. Empty: `selection.lock` beside `perf_database`.",
    )
    confirm_share: float = _setting(
        0.0,
        "number",
        kinds.number(0, 0.5),
        "Part of a device's time in which the likeliest kernels of busy problems are timed beside live work, and the"
        " fastest then taken: 0.01 is one hundredth. 0: never.",
    )
    confirm_builds: int = _setting(
        60, "count", kinds.count(0, 1_000_000), "Kernels that may be compiled for that in an hour."
    )
    perf_database: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "File of the user's own measurements. Empty: `perf.sqlite` in the user's data directory.",
    )
    cache_dir: Path | None = _setting(  # noqa: RUF009
        None, "path", kinds.path, "Folder of compiled kernels. Empty: `tilewright` in the user's cache directory."
    )
    cache_bytes: int = _setting(
        2048 * MIB, "size", kinds.size(0, 2**50), "Size that the cache of compiled kernels is kept to."
    )
    fleet: str = _setting(
        "",
        "url",
        kinds.text,
        "Object storage through which servers share compiled kernels and measurements: `s3://BUCKET/FOLDER`, or another"
        " URL of fsspec (extra `fleet`). Empty: none.",
    )
    fleet_key: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "Private Ed25519 key (PEM) with which this server signs what it puts there. Empty: unsigned.",
    )
    fleet_write: bool = _setting(True, "flag", kinds.flag, "Put there what this server builds and measures.")
    fleet_timeout_s: float = _setting(
        2.0, "seconds", kinds.seconds(0.05, 600), "Time after which one access to that storage is given up."
    )
    fleet_interval_s: float = _setting(
        60.0, "seconds", kinds.seconds(0.05, 86400), "Time between two looks for measurements of other servers."
    )
    compiler: str = _setting("", "name", kinds.text, "C++ compiler, by name or path. Empty: the first that is found.")
    hip_compiler: str = _setting(
        "",
        "name",
        kinds.text,
        "Compiler for AMD GPUs: `hiprtc`, `ziglang`, or a clang++ by name or path. Empty: the first that is found.",
    )
    llvm_objdump: str = _setting(
        "",
        "name",
        kinds.text,
        "The llvm-objdump that reads AMD GPUs' kernels, by name or path. Empty: the first that is found.",
    )
    build_workers: int = _setting(
        0, "count", kinds.count(0, 1024), "Compilers that run at a time. 0: one per usable core."
    )
    build_timeout_s: float = _setting(
        120.0, "seconds", kinds.seconds(1, 86400), "Time after which a compiler counts as hanging."
    )
    workers: int = _setting(
        64,
        "count",
        kinds.count(2, 4096),
        "Threads that answer calls, and as many for requests of streams; started as they are needed. One client's"
        " process has at most half of them.",
    )
    calls_waiting: int = _setting(
        4096,
        "count",
        kinds.count(1, 1_000_000),
        "Calls of each kind that may wait for a thread; more are refused. One client's process has at most half.",
    )
    builds_waiting: int = _setting(
        256, "count", kinds.count(1, 1_000_000), "Calls of `Kernels.Build` that may wait while 16 are served."
    )
    queued_builds: int = _setting(
        32768,
        "count",
        kinds.count(2, 10_000_000),
        "Kernels that may wait for a compiler; more are refused. One client's process has at most half.",
    )
    max_streams: int = _setting(256, "count", kinds.count(1, 65536), "Execution streams that may be open at once.")
    queue_limit: int = _setting(
        256,
        "count",
        kinds.count(1, 1_000_000),
        "Executions that may wait for the device; more are refused. One client's process has at most half.",
    )
    workspace_bytes: int = _setting(
        4096 * MIB, "size", kinds.size(0, 2**50), "Workspace of all executions and bindings of one device together."
    )
    plan_cache_bytes: int = _setting(
        64 * MIB, "size", kinds.size(0, 2**50), "Memory for remembered plans and requests; not for prepared ones."
    )
    max_loaded_kernels: int = _setting(
        1024, "count", kinds.count(1, 100_000), "Kernels that stay loaded while nobody uses them; the rest is unloaded."
    )
    allow_caller_launch: bool = _setting(
        True,
        "flag",
        kinds.flag,
        "Give clients launch plans and code objects, so that they launch kernels in their own processes. `false`: every"
        " launch is the server's.",
    )
    bundle: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "Bundle whose problems are planned, built and loaded before the server is ready. Empty: none.",
    )
    trusted_keys: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "Public keys (PEM) of which one must have signed bundles, archives and what `fleet` holds. Empty: none.",
    )
    warm: Path | None = _setting(  # noqa: RUF009
        None, "path", kinds.path, "Journal whose problems are made ready in the same way. Empty: none."
    )
    journal: Path | None = _setting(  # noqa: RUF009
        None,
        "path",
        kinds.path,
        "File to record the problems in that are asked for, with counts, for `--warm` and `tilewright bundle build`."
        " It is continued if it exists. Empty: nothing is recorded.",
    )
    journal_bytes: int = _setting(
        16 * MIB, "size", kinds.size(0, 2**40), "Size at which nothing more is recorded in the journal."
    )
    local_socket: bool = _setting(
        True,
        "flag",
        kinds.flag,
        "Serve the local socket (descriptors, fast launches) beside the first Unix socket.",
    )
    local_connections: int = _setting(
        256,
        "count",
        kinds.count(1, 65536),
        "Local connections that may be open, each with a thread of its own.",
    )
    session_connections: int = _setting(32, "count", kinds.count(1, 65536), "Local connections of one session.")
    max_sessions: int = _setting(1024, "count", kinds.count(1, 1_000_000), "Sessions that may be open at once.")
    max_regions: int = _setting(4096, "count", kinds.count(1, 60_000), "Shared-memory regions of one session.")
    max_plans: int = _setting(4096, "count", kinds.count(1, 1_000_000), "Prepared plans of one session.")
    plan_bytes: int = _setting(
        256 * MIB, "size", kinds.size(0, 2**50), "Memory that all prepared plans of one session may take together."
    )
    max_bindings: int = _setting(16384, "count", kinds.count(1, 1_000_000), "Bound executions of one session.")
    max_buffers: int = _setting(4096, "count", kinds.count(1, 1_000_000), "Resident buffers of one session.")
    buffer_bytes: int = _setting(
        4096 * MIB,
        "size",
        kinds.size(0, 2**50),
        "Bytes of all resident buffers of one session together; such that can be exported count in whole blocks.",
    )
    inline_limit: int = _setting(
        4 * MIB, "size", kinds.size(0, 512 * MIB), "Largest operand that may travel inside a message, either way."
    )
    message_limit: int = _setting(
        20 * MIB,
        "size",
        kinds.size(64 * 1024, 1024 * MIB),
        "Largest message received. Bounds what a client can make the server hold per call before it is looked at.",
    )
    sessionless_limit: int = _setting(
        4 * MIB + 64 * 1024, "size", kinds.size(1024, 1024 * MIB), "Largest request that names no session."
    )
    receive_bytes: int = _setting(
        160 * MIB,
        "size",
        kinds.size(64 * 1024, 2**50),
        "Memory for requests on their way: as many calls are received at a time as messages of the largest size fit."
        " While others wait, who takes longer than a quarter of a second is refused.",
    )
    request_bytes: int = _setting(
        256 * MIB, "size", kinds.size(64 * 1024, 2**50), "Bytes of large requests that wait or are worked on."
    )
    unread_bytes: int = _setting(
        256 * MIB, "size", kinds.size(64 * 1024, 2**50), "Bytes of large replies that their clients have not read yet."
    )
    region_bytes: int = _setting(
        16 * 2**40, "size", kinds.size(0, 2**50), "Shared memory that is mapped for all clients together."
    )
    all_regions: int = _setting(16000, "count", kinds.count(1, 2**30), "Shared-memory regions of all clients together.")
    all_buffers: int = _setting(16000, "count", kinds.count(1, 2**30), "Resident buffers of all clients together.")
    all_buffer_bytes: int = _setting(2**40, "size", kinds.size(0, 2**50), "Bytes of all resident buffers together.")
    host_buffer_bytes: int = _setting(
        0, "size", kinds.size(0, 2**50), "Bytes of those of CPUs among them. 0: three quarters of the memory there is."
    )
    all_plans: int = _setting(65536, "count", kinds.count(1, 2**30), "Prepared plans of all clients together.")
    all_plan_bytes: int = _setting(1024 * MIB, "size", kinds.size(0, 2**50), "Memory of all prepared plans.")
    max_registered_kernels: int = _setting(
        1000, "count", kinds.count(0, 1_000_000), "Kernels that one session may register for itself."
    )
    registered_kernels: int = _setting(
        16384, "count", kinds.count(0, 2**30), "Kernels that all sessions together may register for themselves."
    )
    shared_kernels: int = _setting(10_000, "count", kinds.count(0, 1_000_000), "Kernels registered for all, at most.")
    max_connections: int = _setting(4096, "count", kinds.count(1, 2**30), "Connections of gRPC that may be open.")
    relay: bool = _setting(
        True,
        "flag",
        kinds.flag,
        "Connections of gRPC pass a relay, which holds what one process or host sends to rates; TLS ends before it.",
    )
    call_rate: float = _setting(
        20_000.0, "number", kinds.number(0, 1e9), "Unary calls that one client's process may make per second; 0: any."
    )
    watchdog_s: float = _setting(
        10.0,
        "seconds",
        kinds.seconds(0, 86400),
        "Time after which a server that does not answer its own health check ends, with status 70. 0: never.",
    )
    keepalive_s: float = _setting(
        20.0,
        "seconds",
        kinds.seconds(1, 7200),
        "Silence after which a TCP client is probed; half of it later it counts as dead.",
    )
    grace_s: float = _setting(
        10.0, "seconds", kinds.seconds(0, 3600), "How long work in flight may take after a stop signal."
    )
    idle_exit_s: float = _setting(
        0.0,
        "seconds",
        kinds.seconds(0, 30 * 86400),
        "Time without a client's session after which the server ends. 0: never.",
    )
    reflection: bool = _setting(
        True, "flag", kinds.flag, "Serve gRPC reflection, so that grpcurl works without the protocol files."
    )
    log_level: str = _setting(
        "info",
        "level",
        kinds.choice("debug", "info", "warning", "error"),
        "How much to log, to standard error. `debug` has a line for each call, `info` one for each that is refused.",
    )
    log_format: str = _setting(
        "text",
        "format",
        kinds.choice("text", "json"),
        "Form of the log: `text`, or `json` with an object on each line.",
    )
    slow_call_s: float = _setting(
        5.0, "seconds", kinds.seconds(0, 86400), "Time above which the log has a line on a call. 0: never."
    )
    trace_endpoint: str = _setting(
        "", "url", kinds.text, "OTLP receiver of traces over gRPC, `http://HOST:4317` (extra `otel`). Empty: no traces."
    )
    trace_ratio: float = _setting(
        0.01, "number", kinds.number(0, 1), "Part of the calls that is traced, of those whose client traces nothing."
    )
    kserve: bool = _setting(
        True, "flag", kinds.flag, "Serve the Open Inference Protocol (KServe version 2) with Triton's additions too."
    )
    kserve_listen: tuple[str, ...] = _setting(
        (),
        "addresses",
        kinds.words,
        "Addresses at which only that protocol is served, as in `listen`; it is then served at no other. Empty: at all"
        " of `listen`.",
    )
    kserve_region_bytes: int = _setting(
        4096 * MIB,
        "size",
        kinds.size(0, 2**50),
        "Shared memory that clients of that protocol may register together: pages of outputs that they did not touch"
        " are made by the server. A quarter of the container's memory at most.",
    )
    kserve_fill: bool = _setting(
        True,
        "flag",
        kinds.flag,
        "Make pages of results of that protocol that clients did not touch. `false`: such results are refused, and no"
        " page of shared memory is the server's.",
    )
    http_listen: str = _setting(
        "",
        "address",
        kinds.text,
        "Address of `/metrics`, `/healthz` and `/readyz` over HTTP: `PORT` on loopback, or `HOST:PORT`. Empty: none.",
    )
    health_listen: str = _setting(
        "",
        "address",
        kinds.text,
        "Address at which gRPC's health service alone is served, without TLS, for a kubelet's gRPC probes: `PORT` on"
        " loopback, or `HOST:PORT`. Empty: none.",
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_cert is None and self.tls_client_ca):
            raise InvalidArgumentError(
                "TLS needs a certificate and its key",
                field="tls_cert" if self.tls_cert is None else "tls_key",
                rule="settings",
                fix="set both tls_cert and tls_key",
            )
        if self.tls_crl is not None and self.tls_client_ca is None:
            raise InvalidArgumentError(
                "a revocation list is of authorities of clients, and there are none",
                field="tls_crl",
                value=str(self.tls_crl),
                rule="settings",
                fix="set tls_client_ca",
            )
        if self.inline_limit + 64 * 1024 > self.message_limit:
            raise InvalidArgumentError(
                "the inline limit does not fit a message",
                field="inline_limit",
                value=self.inline_limit,
                rule="settings",
                fix="raise message_limit, or lower inline_limit to 64 KiB less than it",
            )


_RATES = {item.name for item in fields(Rates)}
TABLE: tuple[Setting, ...] = tuple(
    Setting(item.name, item.metadata["kind"], item.default, item.metadata["doc"], item.metadata["parse"])
    for item in sorted(fields(Settings), key=lambda item: item.name in _RATES)  # which come last, in their order
)
