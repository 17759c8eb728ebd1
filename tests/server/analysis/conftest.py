"""What tests of the analysis share; their helper module is found by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright_kit.contract.operation import Operation
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_tools.analysis.disassembly import Disassembler
from tilewright_tools.cli.problems.loading import load_operation

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def operation() -> Operation[Any, Any]:
    return load_operation("gemm")


@pytest.fixture(scope="module")
def toolchain() -> Iterator[HipToolchain]:
    toolchain = HipToolchain([include_dir()])
    try:
        toolchain.identity()
        Disassembler().find()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    yield toolchain
    toolchain.close()
