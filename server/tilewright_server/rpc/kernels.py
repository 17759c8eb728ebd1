"""The service ``tilewright.v1.Kernels``."""

from __future__ import annotations

from tilewright_server.service import Service

__all__ = ["KernelsServicer"]


class KernelsServicer:
    """What kernels there are, whether a configuration is valid, how it is built and why one is chosen."""

    def __init__(self, service: Service) -> None:
        self._service = service
