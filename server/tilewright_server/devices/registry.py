"""The devices of this server: found once, opened when first used, one object for each, closed together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait

from tilewright_kit.contract.device import Device, DeviceInfo, DeviceProvider
from tilewright_kit.types.errors import DeadlineError, NotFoundError, TilewrightError, UnavailableError
from tilewright_server.devices.contract import Absence, DeviceHost, ExplainingProvider, HostedProvider, IsolatedProvider
from tilewright_server.devices.worker.device import WorkerDevice
from tilewright_server.devices.worker.process import Loss

__all__ = ["DeviceRegistry"]

log = logging.getLogger(__name__)


class DeviceRegistry:
    """Thread-safe. Finding devices opens none of them."""

    def __init__(self, providers: Mapping[str, DeviceProvider], host: DeviceHost, default: str = "") -> None:
        self._providers = {
            kind: provider.hosted(host) if isinstance(provider, HostedProvider) else provider
            for kind, provider in providers.items()
        }
        self._default = default
        self._infos: dict[str, DeviceInfo] | None = None
        self._open: dict[str, Device] = {}
        self._opening: dict[str, Future[Device]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.failures: dict[str, str] = {}
        """Kinds of device that could not be searched for, and why."""
        self.listeners: list[Callable[[Loss], None]] = []
        """Told of devices that were lost, from a thread that must not be kept waiting."""

    def infos(self) -> tuple[DeviceInfo, ...]:
        """All devices, without opening one; GPUs first."""
        return tuple(self._found().values())

    def info(self, device: str = "") -> DeviceInfo:
        """A device by id, or the default one. Raises ``NotFoundError``, with why it is not there."""
        found = self._found()
        name = device or self._default or next(iter(found), "")
        info = found.get(name)
        if info is None:
            raise self._not_found(name, found)
        return info

    def _not_found(self, name: str, found: Mapping[str, DeviceInfo]) -> NotFoundError:
        from difflib import get_close_matches  # where something was not found only

        reason = "this server has no such device" if name else "this server has no device"
        close = get_close_matches(name, found, n=3, cutoff=0.3) or list(found)
        fix = f"use {' or '.join(close)}" if close else "see `tilewright doctor` for what is missing"
        absence = self._absence(name)
        if absence is not None:
            reason = f"{reason}: {absence.reason}"
            # What there is was found when the server started, and is not looked for again.
            fix = f"{absence.fix}; then start the server again" + (f", or {fix}" if close else "")
        return NotFoundError(reason, field="device", value=name, rule="device_id", fix=fix)

    def _absence(self, name: str) -> Absence | None:
        """Why a kind of device has not the device; None if nobody knows more than that."""
        kind = name.partition(":")[0]
        if kind in self.failures:  # the text may say too much for clients
            return Absence(f"looking for devices of kind {kind} failed", "see `tilewright doctor`")
        provider = self._providers.get(kind)
        return provider.absence(name) if isinstance(provider, ExplainingProvider) else None

    @property
    def default(self) -> str:
        """Id of the default device. Raises ``NotFoundError`` if there is none."""
        return self.info().id

    def get(self, device: str = "", timeout: float | None = None) -> Device:
        """The open device; the first call opens it (and may compile its runtime).

        Raises what its provider raises, and ``DeadlineError`` if it is not open within ``timeout`` seconds; the opening
        goes on.
        """
        info = self.info(device)
        opened = self._open.get(info.id)
        if opened is not None:
            return opened
        opening = self._begin(info)
        if not wait((opening,), timeout).done:
            raise DeadlineError(
                "the deadline passed before the device was open",
                field="timeout",
                value=info.id,
                rule="deadline",
                fix="allow more time; the first use of a device opens it",
            )
        return opening.result()

    def _begin(self, info: DeviceInfo) -> Future[Device]:
        """One opening, however many wait for it. In a thread of its own: not everybody can wait as long."""
        with self._lock:
            if self._closed:
                raise _shutting_down()
            opening = self._opening.get(info.id)
            if opening is None:
                opening = self._opening[info.id] = Future()
                threading.Thread(target=self._finish, args=(info, opening), name=info.id, daemon=True).start()
            return opening

    def _finish(self, info: DeviceInfo, opening: Future[Device]) -> None:
        try:
            device = self._open_device(info)
        except BaseException as error:
            with self._lock:
                del self._opening[info.id]  # the next to come tries again
            opening.set_exception(error)
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._open[info.id] = device
        if closed:
            device.close()
            opening.set_exception(_shutting_down())
        else:
            opening.set_result(device)

    def _open_device(self, info: DeviceInfo) -> Device:
        provider = self._providers[info.kind]
        spec = provider.worker(info) if isinstance(provider, IsolatedProvider) else None
        return provider.open(info) if spec is None else WorkerDevice(info, spec, self._lost)

    def _lost(self, loss: Loss) -> None:
        for listener in self.listeners:
            listener(loss)

    def opened(self) -> dict[str, Device]:
        """The devices that are open, by id."""
        return dict(self._open)

    def diagnose(self) -> dict[str, Mapping[str, str]]:
        """By kind, for ``doctor``."""
        return {kind: provider.diagnose() for kind, provider in self._providers.items()}

    def close(self) -> None:
        """Close every open device. Idempotent."""
        with self._lock:
            self._closed = True
            devices, self._open = self._open, {}
        for device in devices.values():
            device.close()

    def _found(self) -> dict[str, DeviceInfo]:
        if self._infos is None:
            with self._lock:
                if self._infos is None:
                    self._infos = self._discover()
        return self._infos

    def _discover(self) -> dict[str, DeviceInfo]:
        infos = [info for kind in self._providers for info in self._discover_kind(kind)]
        infos.sort(key=lambda info: info.kind == "cpu")  # stable: the CPU is the last resort
        return {info.id: info for info in infos}

    def _discover_kind(self, kind: str) -> tuple[DeviceInfo, ...]:
        """One kind that cannot be searched for must not hide the others."""
        try:
            return self._providers[kind].discover()
        except TilewrightError as error:
            self.failures[kind] = str(error)
        except Exception as error:
            self.failures[kind] = type(error).__name__
            log.exception("looking for devices of kind %s failed", kind)
        return ()


def _shutting_down() -> UnavailableError:
    return UnavailableError("the server is shutting down", rule="shutdown", fix="use another server")
