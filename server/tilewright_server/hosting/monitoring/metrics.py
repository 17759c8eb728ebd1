"""The server's metrics in Prometheus' form, gathered when they are asked for: what is counted is counted elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tilewright_kit.types.errors import TilewrightError, UnsupportedError
from tilewright_server import __version__
from tilewright_server.clients.client import Priority
from tilewright_server.devices.contract import CountingDevice
from tilewright_server.endpoints.rpc.relay import Relayed
from tilewright_server.engine.histogram import BOUNDS_NS, Histogram
from tilewright_server.engine.statistics import OperationCounters, PriorityCounters, Snapshot
from tilewright_server.hosting.monitoring.gpus import GpuStates
from tilewright_server.service import Service

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Metrics"]

FRESH_S = 0.25
"""Age up to which a scrape gets what the one before it got: hundreds of scrapers cost no more than one."""
BOUNDS = tuple(f"{bound / 1e9:.9g}" for bound in BOUNDS_NS)
CLASSES = tuple(item.name.lower() for item in Priority)
"""Values of the label `class`: priorities of clients."""
Calls = Callable[[], Mapping[tuple[str, str, Priority], int]]
Times = Callable[[], Mapping[tuple[str, Priority], Histogram]]
Waiting = Callable[[], Mapping[str, int]]
Relays = Callable[[], Iterable[Relayed]]


class Metrics:
    """A registry of its own, and its page."""

    def __init__(
        self,
        service: Service,
        calls: Calls,
        times: Times,
        waiting: Waiting,
        ready: Callable[[], bool],
        relays: Relays,
    ) -> None:
        """Ended calls by method, code and their clients' priority, their times by method and priority, calls that wait
        for a thread by kind, relays before gRPC.

        Raises ``UnsupportedError`` without the package ``prometheus_client``.
        """
        try:
            import prometheus_client
            from prometheus_client import core
        except ModuleNotFoundError:
            raise UnsupportedError(
                "metrics need the package prometheus-client",
                field="http_listen",
                rule="metrics_package",
                fix="pip install 'tilewright[metrics]', or leave http_listen empty",
            ) from None
        self._core: Any = core
        self._generate = prometheus_client.generate_latest
        self.content_type = prometheus_client.CONTENT_TYPE_LATEST
        self._service, self._calls, self._times = service, calls, times
        self._waiting, self._ready, self._relays = waiting, ready, relays
        self._gpus = GpuStates()
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        process: Any = prometheus_client.ProcessCollector
        process(registry=self._registry)
        self._registry.register(self)
        self._lock = threading.Lock()
        self._page = b""
        self._made = float("-inf")

    def page(self) -> bytes:
        """All metrics as text."""
        with self._lock:
            now = time.monotonic()
            if now - self._made >= FRESH_S:
                self._page, self._made = self._generate(self._registry), now
            return self._page

    def collect(self) -> Iterator[Metric]:
        """As the registry asks for."""
        self._service.collect_launches()
        snapshot = self._service.engine.statistics.snapshot()
        yield self._gauge("info", "Version of the server.", {(__version__,): 1}, "version")
        yield self._gauge("uptime_seconds", "Time since the start.", {(): snapshot.uptime_ns / 1e9})
        yield self._gauge("ready", "1 while clients should be sent here.", {(): int(self._ready())})
        yield from self._of_calls()
        yield from self._of_operations(snapshot.operations)
        yield from self._of_caches(snapshot)
        yield from self._of_clients()
        yield from self._of_devices(snapshot)
        yield from self._triton(snapshot)
        yield from self._of_gpus()

    def _of_calls(self) -> Iterator[Metric]:
        calls = {(method, code, CLASSES[item]): count for (method, code, item), count in self._calls().items()}
        text = "gRPC calls that have ended, by method, status code and priority of the client."
        yield self._counter("requests", text, calls, "method", "code", "class")
        times = {(method, CLASSES[priority]): item for (method, priority), item in self._times().items()}
        yield self._histogram("request_seconds", "Time from the call to its reply.", times, "method", "class")
        waiting = {(name,): count for name, count in self._waiting().items()}
        yield self._gauge("calls_waiting", "Calls that wait for a thread, by their kind.", waiting, "kind")
        accepted, refused, paced, now, ended = map(sum, zip((0,) * 5, *self._relays(), strict=True))
        taken = {("accepted",): accepted, ("refused",): refused, ("ended",): ended}
        yield self._counter("connections", "Connections to gRPC through its relays, by result.", taken, "result")
        yield self._gauge("connections_open", "Connections to gRPC through its relays.", {(): now})
        yield self._counter("connection_pauses", "Waits of connections for their process's rate.", {(): paced})

    def _of_operations(self, operations: Iterable[OperationCounters]) -> Iterator[Metric]:
        by = {(item.name,): item for item in operations}
        classes = {
            (item.name, CLASSES[level]): counters
            for item in by.values()
            for level, counters in enumerate(item.classes)
            if counters.counted
        }
        ended = {key: item.success for key, item in classes.items()}
        yield self._counter("executions", "Executions that ended well.", ended, "operation", "class")
        failures = {
            (operation, code, name): count
            for (operation, name), item in classes.items()
            for code, count in item.failures.items()
        }
        yield self._counter(
            "execution_failures", "Executions that failed, by error code.", failures, "operation", "code", "class"
        )
        plans = {(item.name, "hit"): item.plan_hits for item in by.values()}
        plans |= {(item.name, "miss"): item.plan_misses for item in by.values()}
        yield self._counter(
            "plan_requests", "Plans asked for, by whether they were remembered.", plans, "operation", "result"
        )
        histograms: tuple[tuple[str, str, Callable[[PriorityCounters], Histogram]], ...] = (
            ("queue_seconds", "Time that an execution waited for its device.", lambda item: item.queue),
            ("plan_seconds", "Time to make a plan that was not remembered.", lambda item: item.plan),
            ("build_seconds", "Time that a plan waited for compilers.", lambda item: item.build),
            ("device_seconds", "Time of an execution on its device, all repeats together.", lambda item: item.device),
        )
        for name, text, pick in histograms:
            times = {key: pick(item) for key, item in classes.items()}
            yield self._histogram(name, text, times, "operation", "class")
        for name, text, values in (
            (
                "caller_launches",
                "Launches in processes of clients, as these count them.",
                {key: item.caller_launches for key, item in by.items()},
            ),
            (
                "caller_launch_samples",
                "Launches of these that were timed.",
                {key: item.caller_samples for key, item in by.items()},
            ),
            (
                "caller_launch_sampled_seconds",
                "Time of those that were timed.",
                {key: item.caller_sampled_ns / 1e9 for key, item in by.items()},
            ),
        ):
            yield self._counter(name, text, values, "operation")
        copied = {key: item.bytes_copied for key, item in by.items()}
        yield self._counter("copied_bytes", "Operands that the server copied.", copied, "operation")
        copies = {(item.name, "in"): item.copy_in_ns / 1e9 for item in by.values()}
        copies |= {(item.name, "out"): item.copy_out_ns / 1e9 for item in by.values()}
        yield self._counter("copy_seconds", "Time spent copying operands.", copies, "operation", "direction")

    def _of_caches(self, snapshot: Snapshot) -> Iterator[Metric]:
        yield self._gauge("plans", "Plans that are remembered.", {(): snapshot.plans})
        for name, text, value in (
            ("artifact_hits", "Kernels found compiled.", snapshot.artifact_hits),
            ("artifact_builds", "Kernels compiled.", snapshot.artifact_builds),
            ("artifact_failures", "Kernels that did not compile.", snapshot.artifact_failures),
            ("artifacts_quarantined", "Damaged entries of the artifact cache.", snapshot.artifacts_quarantined),
            ("artifacts_evicted", "Entries that the artifact cache had no room for.", snapshot.artifacts_evicted),
        ):
            yield self._counter(name, text, {(): value})
        renewed = self._service.choices_renewed
        yield self._counter(
            "choices_renewed", "Times that measurements changed, and plans were made anew.", {(): renewed}
        )
        shared = self._service.engine.pool.shared
        if shared is None:
            return
        state = shared.state()
        yield self._counter(
            "fleet_objects", "Objects of the fleet's storage, by what became of them.", state.objects, "kind", "result"
        )
        yield self._gauge("fleet_waiting", "Kernels to be written to the fleet's storage.", {(): state.waiting})
        yield self._gauge("fleet_serves", "0 while that storage is left alone since it fails.", {(): int(state.serves)})

    def _of_clients(self) -> Iterator[Metric]:
        usage = self._service.sessions.usage()
        for name, text in (
            ("sessions", "Open sessions."),
            ("regions", "Shared-memory regions."),
            ("region_bytes", "Bytes of shared-memory regions."),
            ("buffers", "Resident buffers."),
            ("buffer_bytes", "Bytes of resident buffers."),
            ("bindings", "Bound executions."),
            ("attached_connections", "Connections that devices serve by themselves."),
        ):
            yield self._gauge(name, text, {(): getattr(usage, name)})
        held, limits, refused = self._service.sessions.quotas.totals()
        for name, text, values in (
            ("quota_held", "Held by all clients together, by resource.", held),
            ("quota_limit", "Most that all clients together may hold, by resource.", limits),
        ):
            yield self._gauge(name, text, {(key,): value for key, value in values.items()}, "resource")
        yield self._counter(
            "quota_refusals",
            "Requests refused by a quota, by resource.",
            {(key,): value for key, value in refused.items()},
            "resource",
        )

    def _of_devices(self, snapshot: Snapshot) -> Iterator[Metric]:
        devices = self._service.engine.devices
        opened = devices.opened()
        known = {(info.id, info.kind): int(info.id in opened) for info in devices.infos()}
        yield self._gauge(
            "device_open",
            "1 for a device that is open.",
            known,
            "device",
            "kind",
        )
        busy: dict[tuple[str], float] = {}
        for kernel in snapshot.kernels:
            if kernel.device:
                busy[kernel.device,] = busy.get((kernel.device,), 0.0) + kernel.device_ns / 1e9
        yield self._counter("device_busy_seconds", "Time of kernels that the server launched.", busy, "device")
        losses = {(name,): count for name, count in snapshot.losses.items()}
        yield self._counter("device_losses", "Processes of devices that ended unasked.", losses, "device")
        counters: dict[tuple[str, ...], float] = {}
        for name, device in opened.items():
            with suppress(TilewrightError):  # lost just now
                if isinstance(device, CountingDevice):
                    counters |= {(name, what): value for what, value in device.counters().items()}
        yield self._gauge("device_events", "Counters that a device keeps by itself.", counters, "device", "counter")
        yield self._gauge("queue_depth", "Executions that wait for a device.", {(): snapshot.queue_depth})
        yield self._gauge("workspace_bytes", "Workspace that is reserved on devices.", {(): snapshot.workspace_bytes})

    def _triton(self, snapshot: Snapshot) -> Iterator[Metric]:
        """Names of Triton's metrics where they mean the same; an operation is a model."""
        rows = [(("tilewright." + item.name, "1"), item) for item in snapshot.operations]
        for name, text, values in (
            ("request_success", "Executions that ended well.", {key: item.success for key, item in rows}),
            ("count", "Executions that ended well.", {key: item.success for key, item in rows}),
            ("exec_count", "Executions that ended well.", {key: item.success for key, item in rows}),
            ("queue_duration_us", "Time in the queue.", {key: item.queue_ns // 1000 for key, item in rows}),
            ("compute_infer_duration_us", "Time on devices.", {key: item.device_ns // 1000 for key, item in rows}),
            ("compute_input_duration_us", "Copies of inputs.", {key: item.copy_in_ns // 1000 for key, item in rows}),
            (
                "compute_output_duration_us",
                "Time copying outputs.",
                {key: item.copy_out_ns // 1000 for key, item in rows},
            ),
        ):
            family = self._core.UnknownMetricFamily(f"nv_inference_{name}", text, labels=("model", "version"))
            yield self._filled(family, values)
        family = self._core.UnknownMetricFamily(
            "nv_inference_request_failure", "Executions that failed.", labels=("model", "version", "reason")
        )
        yield self._filled(
            family, {(*key, code.upper()): count for key, item in rows for code, count in item.failures.items()}
        )

    def _of_gpus(self) -> Iterator[Metric]:
        """Names of Triton's metrics of GPUs: of all processes on them, as the driver tells."""
        infos = [info for info in self._service.engine.devices.infos() if info.kind == "cuda"]
        states = self._gpus.read((str(info.attributes["uuid"]), str(info.attributes["pci"])) for info in infos)
        for name, text in (
            ("nv_gpu_utilization", "Share of time in which kernels run, 0 to 1."),
            ("nv_gpu_power_usage", "Power of the GPU, in watts."),
            ("nv_gpu_power_limit", "Limit of the GPU's power, in watts."),
            ("nv_energy_consumption", "Energy of the GPU since its driver was loaded, in joules."),
            ("nv_gpu_memory_total_bytes", "Memory of the GPU."),
            ("nv_gpu_memory_used_bytes", "Memory of the GPU that is in use, by all processes."),
        ):
            kind = self._core.UnknownMetricFamily if name == "nv_energy_consumption" else self._core.GaugeMetricFamily
            what = name.removeprefix("nv_").removeprefix("gpu_")
            values = {(state.uuid,): state.values[what] for state in states if what in state.values}
            yield self._filled(kind(name, text, labels=("gpu_uuid",)), values)

    def _gauge(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(self._core.GaugeMetricFamily(f"tilewright_{name}", text, labels=labels), values)

    def _counter(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(self._core.CounterMetricFamily(f"tilewright_{name}", text, labels=labels), values)

    @staticmethod
    def _filled(family: Any, values: Mapping[Any, float]) -> Metric:
        for key, value in values.items():
            family.add_metric(key, value)
        return family

    def _histogram(self, name: str, text: str, values: Mapping[Any, Histogram], *labels: str) -> Metric:
        family = self._core.HistogramMetricFamily(f"tilewright_{name}", text, labels=labels)
        for key, item in values.items():
            below, buckets = 0, []
            for bound, count in zip((*BOUNDS, "+Inf"), item.counts, strict=True):
                below += count
                buckets.append((bound, below))
            family.add_metric(key, buckets, item.sum_ns / 1e9)
        return family
