"""Any number of D tensors is one kernel, and does not take longer to compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw


@pytest.mark.parametrize("count", [1, 2, 9, 8, 255, 10])
@pytest.mark.parametrize("binary", ["add", "multiply"])
@pytest.mark.some(6)
def test_many_d_tensors_of_all_broadcast_forms(real_server: Any, count: int, binary: str) -> None:
    rng = np.random.default_rng()
    shapes = [(33, 50), (1, 50), (33, 1), (1, 1)]
    with tw.connect(real_server.target) as client:
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((33, 40), (40, 50)))
        d = [rng.uniform(0.9, 1.1, shapes[index % 4]).astype(np.float32) for index in range(count)]
        wanted = a.astype(np.float64) @ b.astype(np.float64)
        for operand in d:
            wanted = wanted + operand if binary == "add" else wanted * operand
        result = client.gemm(a, b, d=d, binary=binary)
        assert np.linalg.norm(result - wanted) < 1e-5 * np.linalg.norm(wanted)
