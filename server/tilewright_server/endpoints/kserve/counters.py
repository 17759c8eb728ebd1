"""Counters of a model, in the terms of ModelStatistics."""

from __future__ import annotations

import threading
import time

from tilewright_proto.inference import inference_pb2 as pb
from tilewright_server.service import RunResult

__all__ = ["ModelCounters"]


class ModelCounters:
    """Thread-safe. Times are in nanoseconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._success = self._fail = 0
        self._last_ms = 0
        self._total = self._failed = self._queue = self._copy_in = self._device = self._copy_out = 0

    def succeeded(self, result: RunResult, total_ns: int) -> None:
        """Count a request that was answered after ``total_ns``."""
        with self._lock:
            self._success += 1
            self._last_ms = int(time.time() * 1000)
            self._total += total_ns
            self._queue += result.outcome.queue_ns
            self._copy_in += result.copy_in_ns
            self._device += result.outcome.device_ns
            self._copy_out += result.copy_out_ns

    def failed(self, total_ns: int) -> None:
        """Count a request that was refused or failed after ``total_ns``."""
        with self._lock:
            self._fail += 1
            self._failed += total_ns

    def message(self, name: str, version: str) -> pb.ModelStatistics:
        """All counters now."""
        with self._lock:
            count = self._success

            def spent(ns: int) -> pb.StatisticDuration:
                return pb.StatisticDuration(count=count, ns=ns)

            return pb.ModelStatistics(
                name=name,
                version=version,
                last_inference=self._last_ms,
                inference_count=count,
                execution_count=count,
                inference_stats=pb.InferStatistics(
                    success=spent(self._total),
                    fail=pb.StatisticDuration(count=self._fail, ns=self._failed),
                    queue=spent(self._queue),
                    compute_input=spent(self._copy_in),
                    compute_infer=spent(self._device),
                    compute_output=spent(self._copy_out),
                    cache_hit=pb.StatisticDuration(),
                    cache_miss=pb.StatisticDuration(),
                ),
                batch_stats=[
                    pb.InferBatchStatistics(
                        batch_size=1,
                        compute_input=spent(self._copy_in),
                        compute_infer=spent(self._device),
                        compute_output=spent(self._copy_out),
                    )
                ],
            )
