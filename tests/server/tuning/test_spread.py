"""Problems spread over a Ray cluster: every row comes here, also those of a node that was lost."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_kit.types.errors import UnavailableError
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.measure.timing import TimingOptions
from tilewright_tools.tuning.spread import Kind, measured, spread
from tilewright_tools.tuning.sweep import SweepOptions

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'tilewright[ray]'"
)
CASES = [Case(m, 16, 24) for m in (1, 8, 17)]
OPTIONS = SweepOptions("cpu:0", limit=1, timing=TimingOptions(warmup=1, repeat=3, seconds=0.05))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two nodes, each with processes of its own."""
    utilities = importlib.import_module("ray.cluster_utils")
    made = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    yield made
    made.shutdown()


def test_a_task_measures_one_problem_and_goes_on_with_what_is_known(plain: Setup) -> None:
    rows = measured(Kind(), plain, OPTIONS, CASES[0], ())
    assert [(item.case, item.status) for item in rows] == [(CASES[0], "ok")]
    assert measured(Kind(), plain, OPTIONS, CASES[0], rows) == []


@needs_ray
@pytest.mark.extended
def test_rows_of_all_nodes_come_together_and_a_lost_one_loses_nothing(plain: Setup, cluster: Any) -> None:
    found = []
    rows = spread(cluster.address, Kind(), plain, OPTIONS, CASES, {})
    found.append(next(rows))
    lost = threading.Thread(target=cluster.remove_node, args=(cluster.nodes[0],))
    lost.start()
    found += rows
    lost.join()
    assert {item.case for item in found} == set(CASES)
    assert all(item.status == "ok" for item in found)
    known = {case: [item for item in found if item.case == case] for case in CASES}
    assert list(spread(cluster.address, Kind(), plain, OPTIONS, CASES, known)) == []


def test_an_address_without_a_cluster_is_told() -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'tilewright[ray]'")
    with pytest.raises(UnavailableError, match="no Ray cluster") as caught:
        list(spread("127.0.0.1:1", Kind(), Setup("unused"), OPTIONS, CASES, {}))
    assert "ray start" in caught.value.fix
