"""The composition root: makes the parts of a server, runs it and takes it down again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright_kit.types.errors import InvalidArgumentError, TilewrightError
from tilewright_server import __version__
from tilewright_server.protocol.inherited import Inherited
from tilewright_server.settings import Settings

if TYPE_CHECKING:
    from tilewright_kit.loading.loader import PluginManager
    from tilewright_server.endpoints.local.server import LocalServer
    from tilewright_server.endpoints.readiness import Readiness
    from tilewright_server.endpoints.rpc.access.gate import Gate
    from tilewright_server.endpoints.rpc.listeners import Listener, TcpAddress, UnixAddress
    from tilewright_server.endpoints.rpc.server import RpcServer
    from tilewright_server.endpoints.rpc.watchdog import Watchdog
    from tilewright_server.engine.engine import Engine
    from tilewright_server.hosting.lifecycle.service_manager import ServiceManager
    from tilewright_server.hosting.monitoring.http import HttpListener
    from tilewright_server.protocol.unix_paths import SocketAccess
    from tilewright_server.service import Service
    from tilewright_server.session.sessions import Sessions

__all__ = ["Application"]

log = logging.getLogger("tilewright")

LAST_REPLIES_S = 1.0
"""After the last work, how long replies may take to leave before whoever only watches is cut off."""

STOP_S = 10.0
"""Seconds beyond the grace period after which a device or a launch that hangs does not keep the process any more."""

LAST_STEPS_S = 0.5
"""How long work that was cancelled may take to notice."""


class Application:
    """One server. ``start`` and ``stop`` for embedding; ``run`` for a process of its own."""

    sessions: Sessions
    engine: Engine
    service: Service
    rpc: RpcServer
    plugins: PluginManager
    local: LocalServer | None = None
    http: HttpListener | None = None
    readiness: Readiness
    gate: Gate

    def __init__(self, settings: Settings, reread: Callable[[], Settings] | None = None) -> None:
        """``reread`` returns the settings anew when SIGHUP asks for it; it raises ``TilewrightError``."""
        self.settings = self._given = settings
        self._reread = reread
        self._watchdog: Watchdog | None = None
        self._ending = threading.Event()
        self.listeners: list[Listener] = []
        self._own_address = ""
        self._more_listeners: list[Listener] = []
        self._parts = ExitStack()
        self._clean = True
        self.inherited = Inherited()
        self._has_successor = False
        self._stopped = threading.Lock()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where clients reach it, in the form that they take."""
        return tuple(str(listener.address) for listener in self.listeners)

    def start(self, wanted: Callable[[], bool] = lambda: True, *, rest: bool = True) -> None:
        """Listen and serve. On an error (``TilewrightError``) nothing is left behind.

        Opens no device, but for a warm start, which ends early when it is not ``wanted`` any more: that is done in the
        background, and so are imports of the ``rest``. A device that the settings name must be there, though.
        """
        from tilewright_server.hosting.lifecycle.warm import load_the_rest

        try:
            self._start(wanted)
        except BaseException:
            self._parts.close()
            raise
        if rest:
            load_the_rest(self.engine)

    def _start(self, wanted: Callable[[], bool]) -> None:
        # Imported here: naming the composition root must not cost what running it does.
        from tilewright_server.endpoints.kserve.listening import serve_kserve
        from tilewright_server.endpoints.messages.greeting import greeting
        from tilewright_server.endpoints.readiness import Readiness
        from tilewright_server.endpoints.rpc.access.credentials import make_certificates
        from tilewright_server.endpoints.rpc.access.gate import Gate
        from tilewright_server.endpoints.rpc.listeners import Listener
        from tilewright_server.endpoints.rpc.server import RpcServer
        from tilewright_server.hosting.audit import open_audit_log
        from tilewright_server.hosting.grpc_connections import Connections
        from tilewright_server.hosting.lifecycle.observers import open_observers
        from tilewright_server.hosting.lifecycle.warm import make_ready, open_default
        from tilewright_server.hosting.limits import make_quotas, session_limits
        from tilewright_server.hosting.mps import Mps
        from tilewright_server.protocol.unix_paths import socket_access
        from tilewright_server.service import Service
        from tilewright_server.session.sessions import Sessions
        from tilewright_server.settings import default_listen

        settings = self.settings
        certificates = make_certificates(settings)
        self.gate = Gate(settings.policy, certificates, open_socket=settings.socket_mode != "600")
        addresses = self._addresses(settings.listen, certificates is not None)
        access = socket_access(settings.socket_mode, settings.socket_group)
        open_audit_log(settings.audit_log)
        self.plugins = self.load_plugins()
        mps = self._mps = Mps(settings.mps, Path(default_listen().removeprefix("unix:")).parent)
        self._parts.callback(mps.close)
        self.engine = self.make_engine(self.plugins)
        self._parts.callback(self.engine.close)
        self.sessions = Sessions(session_limits(settings), make_quotas(settings))
        self.service = Service(
            self.engine,
            self.sessions,
            settings.inline_limit,
            settings.message_limit - 64 * 1024,
            allow_caller_launch=settings.allow_caller_launch,
            observers=open_observers(settings, self.engine, lambda: self.service.renew_choices(), self._parts),
        )
        self._parts.callback(self.service.close)
        mps.start(any(info.kind == "cuda" for info in self.engine.devices.infos()))
        opened = greeting(self.engine, settings)
        opened.mps_pipe_directory = mps.folder
        self.rpc = RpcServer(self.service, settings, opened, self.gate)
        self.readiness = Readiness(self.rpc.set_ready)
        self.http = self._listen_for_http()
        for address in addresses:
            peers = self.rpc.peers if settings.relay else None
            listener = Listener(address, access, peers=peers, inherited=self.inherited, settings=settings)
            listener.bind(self.rpc.server, certificates)
            self._parts.callback(listener.close)
            self.listeners.append(listener)
        self._own_address = self._own_door()
        own = self._addresses(settings.kserve_listen, certificates is not None)
        self._more_listeners = serve_kserve(self, own, access, certificates, self._parts)
        if settings.health_listen:
            from tilewright_server.hosting.monitoring.pages import health_listeners

            self._more_listeners += health_listeners(self.rpc, settings, self.inherited, self._parts)
        connections = Connections([item.address for item in self._all_listeners()], settings.max_connections)
        connections.start()  # ends those of whoever has too many
        self._parts.callback(connections.close)
        self.local = self._listen_locally(access)
        if self.local is not None:
            opened.local_socket = str(self.local.path)
        self.plugins.startup(self)
        self._parts.callback(self.plugins.shutdown, self)
        make_ready(settings, self.engine, wanted)
        if self.local is not None:
            self.local.start()
        self.rpc.start(self.engine.operations, self._all_listeners())
        if self.http is not None:
            self.http.start()
        opening = (self.engine, self.readiness, self._ending)
        threading.Thread(target=open_default, args=opening, name="warm", daemon=True).start()

    def _addresses(self, texts: Iterable[str], tls: bool) -> list[UnixAddress | TcpAddress]:
        """Addresses of the settings, each of which may be listened on."""
        from tilewright_server.endpoints.rpc.listeners import parse_address

        settings = self.settings
        authenticated = tls and (settings.tls_client_ca is not None or self.gate.knows_tokens)
        return [
            parse_address(
                text, authenticated=authenticated, insecure=settings.insecure, network=settings.insecure_network
            )
            for text in texts
        ]

    def _own_door(self) -> str:
        """The address by which the server asks for its own health: over TCP it has no certificate to show to itself,
        and might be paced for what others of its host send."""
        from tilewright_server.endpoints.rpc.listeners import Listener, UnixAddress

        for listener in self.listeners:
            if isinstance(listener.address, UnixAddress):
                return str(listener.address)
        folder = tempfile.TemporaryDirectory(prefix="tilewright-", ignore_cleanup_errors=True)
        listener = Listener(UnixAddress(Path(self._parts.enter_context(folder)) / "own.sock"))
        listener.bind(self.rpc.server)
        self._parts.callback(listener.close)
        return str(listener.address)

    def _listen_locally(self, access: SocketAccess) -> LocalServer | None:
        """Beside the first Unix socket; none if there is no such, or the settings say so."""
        from tilewright_server.endpoints.local.listener import local_path
        from tilewright_server.endpoints.local.server import LocalServer
        from tilewright_server.endpoints.rpc.listeners import UnixAddress

        settings = self.settings
        paths = [item.address.path for item in self.listeners if isinstance(item.address, UnixAddress)]
        if not settings.local_socket or not paths:
            return None
        try:
            path = local_path(paths[0])
        except InvalidArgumentError as error:  # gRPC is complete without it
            log.warning("no local socket: %s", error)
            return None
        local = LocalServer(
            self.service, path, settings.session_connections, access, settings.allowed_uids, self.inherited
        )
        local.tracer = self.rpc.traffic.tracer
        self._parts.callback(local.close)
        return local

    def _all_listeners(self) -> list[Listener]:
        return [*self.listeners, *self._more_listeners]

    def _at_addresses(self) -> list[Listener | LocalServer | HttpListener]:
        return [item for item in (*self._all_listeners(), self.local, self.http) if item is not None]

    def _listen_for_http(self) -> HttpListener | None:
        """Metrics and probes, if the settings name an address."""
        address = self.settings.http_listen
        if not address:
            return None
        from tilewright_server.hosting.monitoring.pages import http_listener

        watchers = self.service, self.rpc, self.readiness, self._is_silent, self._all_listeners
        listener = self._parts.enter_context(contextlib.closing(http_listener(address, *watchers, self.inherited)))
        log.info("metrics and probes over HTTP at %s", listener.address)
        return listener

    def _is_silent(self) -> bool:
        return self._watchdog is not None and self._watchdog.silent

    def load_plugins(self) -> PluginManager:
        """The plugins that the settings allow; those that fail are logged, reported and left out."""
        from tilewright_kit.loading.loader import PluginManager

        plugins = PluginManager(self.settings.plugins or None, self.settings.disabled_plugins)
        plugins.load_entry_points(announced=True)
        return plugins

    def make_engine(self, plugins: PluginManager) -> Engine:
        from tilewright_server.engine.engine import Engine
        from tilewright_server.hosting.limits import engine_options

        return Engine(engine_options(self.settings), plugins)

    def stop(self, grace_s: float | None = None) -> None:
        """Refuse new work, let work in flight finish for up to ``grace_s`` seconds, cancel the rest, and give
        everything back. Idempotent.
        """
        if not self.listeners or not self._stopped.acquire(blocking=False):
            return
        grace = self.settings.grace_s if grace_s is None else grace_s
        deadline = time.monotonic() + grace
        self._ending.set()
        self.readiness.end()
        if not self._has_successor:
            self._leave(kept_alone=True)  # who comes now waits for the next server
        self.rpc.health.enter_graceful_shutdown()
        terminated = self.rpc.drain(grace)
        self.rpc.streams.stop()
        if self.local is not None:
            self.local.drain()
        self._clean = self.engine.drain(grace)
        self.rpc.leases.close("the server is shutting down")
        # What is open now are replies on their way, and watchers, which would stay for ever.
        terminated.wait(min(LAST_REPLIES_S, max(0.0, deadline - time.monotonic())))
        self.rpc.cancel()
        # Cancelled repeats end within milliseconds.
        self._clean = self._clean or self.engine.drain(LAST_STEPS_S)
        for listener in (*self.listeners, *self._more_listeners):
            listener.close()
        if self.local is not None and not self.local.close():
            log.warning("a local connection is still at work")
        if not self._clean:
            log.warning("work in flight was given up after %g s", grace)
            return  # memory and kernels in use cannot be given back; the end of the process does that
        if not self.sessions.close_all(timeout=1.0):
            log.warning("memory of a session is still in use")
        self.rpc.close()
        self._parts.close()

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit status. A second signal ends the process at once."""
        from tilewright_server.hosting.lifecycle.interpreter import collecting_later, set_up_interpreter
        from tilewright_server.hosting.lifecycle.service_manager import ServiceManager
        from tilewright_server.hosting.lifecycle.signals import OTHERS, end_when_idle, process_signals
        from tilewright_server.hosting.lifecycle.warm import load_the_rest
        from tilewright_server.hosting.logs import set_up
        from tilewright_server.hosting.settings import inherited_sockets, service_manager

        set_up_interpreter()
        set_up(self.settings.log_level, self.settings.log_format)
        wishes = service_manager()
        manager = ServiceManager(wishes.notify_socket)
        self.inherited = Inherited(inherited_sockets())
        self._fit()
        wanted = threading.Event()
        stopping = threading.Thread(target=self._stop_when, args=(wanted,), name="stop", daemon=True)
        stopping.start()  # now: the system may refuse threads when it is needed
        with process_signals() as signals:
            try:
                with collecting_later():
                    self.start(signals.empty, rest=False)
            except TilewrightError as error:
                log.error("cannot start: %s", error)
                return 1
            self._watchdog = self._watched(manager, wishes.watchdog_s)
            if self.settings.idle_exit_s:
                watching = (lambda: self.sessions.usage().sessions, self.settings.idle_exit_s, wanted)
                threading.Thread(target=end_when_idle, args=watching, name="idle", daemon=True).start()
            self._say_ready()
            manager.tell("READY=1", "STATUS=serving at " + " ".join(self.addresses))
            self.inherited.say_ready()
            load_the_rest(self.engine, collecting_later)
            from tilewright_server.hosting.lifecycle.succession import Succession  # before its file may be another's

            succession = Succession(self._shared, partial(self._succeeded, manager))
            while (number := signals.get()) in OTHERS:
                if number == signal.SIGUSR2:
                    succession.begin()
                    continue
                with manager.reloading():
                    self.reload()
            log.info("%s: draining for up to %g s", signal.Signals(number).name, self.settings.grace_s)
            if not self._has_successor:
                manager.tell("STOPPING=1", "STATUS=draining")
            if self._watchdog is not None:
                self._watchdog.stop()
            wanted.set()
            stopping.join(self.settings.grace_s + STOP_S)
            if stopping.is_alive():
                log.warning("a device or a client holds up the end: it is not waited for")
                self._clean = False
            log.info("stopped")
            logging.shutdown()
            if not self._clean:
                os._exit(0)  # threads that are still at work would hold up the interpreter's end
        return 0

    def _stop_when(self, wanted: threading.Event) -> None:
        """``stop``, as far as it gets in time; the end of the process does the rest."""
        wanted.wait()
        try:
            self.stop()
        except Exception:
            self._clean = False
            log.exception("the server did not end well")

    def _succeeded(self, manager: ServiceManager, pid: int) -> None:
        log.info("process %d serves now, this one ends", pid)
        self._has_successor = True
        manager.tell(f"MAINPID={pid}", "READY=1")
        self._leave()
        os.kill(os.getpid(), signal.SIGTERM)

    def _fit(self) -> None:
        """Make do with the limits of the system."""
        from tilewright_server.hosting.limits import fitted, process_limits, raise_descriptor_limit

        raise_descriptor_limit()
        limits = process_limits()
        self.settings, lowered = fitted(self.settings, limits)
        log.info("limits of the system: %s", limits.describe())
        for line in lowered:
            log.warning("lowered to fit the limits of the system: %s", line)

    def reload(self) -> None:
        """Take over from the settings anew what a running server can, and read policy and certificates again; the old
        ones stay if there is a mistake."""
        from tilewright_server.hosting.audit import open_audit_log
        from tilewright_server.hosting.lifecycle.reload import read_again
        from tilewright_server.hosting.limits import quota_limits
        from tilewright_server.hosting.logs import set_up

        self.gate.reload()
        try:
            open_audit_log(self.settings.audit_log)
        except TilewrightError as error:
            log.error("the audit log stays as it is: %s", error)
        changes = read_again(self._given, self._reread)
        if changes is None:
            return
        self.settings = replace(self.settings, **changes)
        self._given = replace(self._given, **changes)
        self._fit()
        set_up(self.settings.log_level, self.settings.log_format)
        self.rpc.traffic.slow_s = self.settings.slow_call_s
        self.sessions.quotas.set_limits(quota_limits(self.settings), self.settings.call_rate)

    def _shared(self) -> list[tuple[int, str]]:
        """Descriptors for a successor. Raises ``UnsupportedError`` if there is a listener that cannot go over."""
        self._mps.check_succession()
        return [item for part in self._at_addresses() for item in part.shared()]

    def _leave(self, *, kept_alone: bool = False) -> None:
        """Leave the addresses to whoever serves there next, and wait until clients are there. ``kept_alone``: those
        that a service manager keeps."""
        left = [item for item in self._at_addresses() if item.is_kept or not kept_alone]
        for item in left:
            item.leave()
        if left:
            self.rpc.wait_until_quiet(LAST_REPLIES_S * 5)

    def _watched(self, manager: ServiceManager, manager_s: float) -> Watchdog | None:
        """A watchdog, if the settings or the service manager want one; the latter hears of each answer."""
        from tilewright_server.endpoints.rpc.watchdog import Watchdog

        limit_s = self.settings.watchdog_s or manager_s
        if not limit_s:
            return None
        watchdog = Watchdog(self._own_address, limit_s, alive=lambda: manager.tell("WATCHDOG=1"))
        watchdog.start()
        return watchdog

    def _say_ready(self) -> None:
        line = "ready: " + " ".join(self.addresses)
        log.info("%s, version %s, operations: %s", line, __version__, ", ".join(self.engine.operations) or "none")
        with contextlib.suppress(OSError, ValueError):  # nobody has to listen
            for handler in logging.getLogger().handlers:
                handler.flush()
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    @property
    def operations(self) -> Mapping[str, Any]:
        """By name; part of what plugins are shown at start-up."""
        return self.engine.operations

    @property
    def devices(self) -> Any:
        """The registry of devices; part of what plugins are shown at start-up."""
        return self.engine.devices
