"""Makes the helpers of this folder importable for its tests, and gives them archs and a device."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parent))

from kernel_fixtures import arch, cpu, device, pytest_generate_tests  # noqa: F401
