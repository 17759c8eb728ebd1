"""Servers of a fleet that share a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleet_nodes import Node

from tilewright_server.hosting.fleet.breaker import Breaker
from tilewright_server.hosting.fleet.seal import Seal
from tilewright_server.hosting.fleet.store import Store


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder as storage."""
    pytest.importorskip("fsspec", reason="the fleet's storage needs fsspec: pip install 'tilewright[fleet]'")
    return f"file://{tmp_path}/storage"


@pytest.fixture
def node(tmp_path: Path, url: str) -> Iterator[Callable[..., Node]]:
    """Makes servers, of one storage unless ``store`` says another."""
    nodes: list[Node] = []

    def make(store: Store | None = None, seal: Seal | None = None, **options: Any) -> Node:
        store = store or Store(url, 30.0, Breaker(failures=2, rest_s=1000.0))
        nodes.append(Node(tmp_path / f"node-{len(nodes)}", store, seal, **options))
        return nodes[-1]

    yield make
    for item in nodes:
        item.close()
