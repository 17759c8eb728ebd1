"""A plugin that builds on GEMM, on a GPU: what one product hands to the next lies in the workspace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_server import CudaServer

import tilewright
from tilewright_kit.numerics.compare import compare
from tilewright_kit.types.dtypes import DType

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "swiglu"
METADATA = "Metadata-Version: 2.1\nName: tilewright-swiglu\nVersion: 0.1.0\n"
ENTRY_POINTS = "[tilewright.plugins]\nswiglu = tilewright_swiglu.plugin\n"


@pytest.fixture(scope="module")
def client(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tilewright.Client]:
    """Client of a server that finds the plugin as if it were installed."""
    installed = tmp_path_factory.mktemp("site")
    record = installed / "tilewright_swiglu-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(METADATA)
    (record / "entry_points.txt").write_text(ENTRY_POINTS)
    paths = [str(installed), str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        with CudaServer() as server, tilewright.connect(server.target) as made:
            yield made


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("fp32", (33, 70, 51, 29)),
        ("bf16", (512, 1024, 2048, 1024)),  # the copy engine reads what the second product left
        ("fp16", (16, 4096, 512, 4096)),  # few rows: K is shared, by way of workspace and counters
        ("bf16", (61, 83, 147, 91)),  # strides that the copy engine does not take
    ],
)
def test_three_products_are_right(client: tilewright.Client, dtype: str, sizes: tuple[int, int, int, int]) -> None:
    m, k, n, width = sizes
    rng = np.random.default_rng(5)
    shapes = {"x": (m, k), "w_gate": (k, n), "w_up": (k, n), "w_down": (n, width)}
    arrays = {
        name: (rng.standard_normal(shape) / np.sqrt(shape[0] if name != "x" else 1)).astype(DType(dtype).numpy)
        for name, shape in shapes.items()
    }
    x, w_gate, w_up, w_down = (array.astype(np.float64) for array in arrays.values())
    gate = x @ w_gate
    truth = (gate / (1 + np.exp(-gate)) * (x @ w_up)) @ w_down
    for _ in range(3):
        out = client.run("swiglu", {name: client.asarray(array) for name, array in arrays.items()})["out"]
        assert compare(np.asarray(out), truth, DType(dtype), n).passed
