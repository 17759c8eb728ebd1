"""The page of operations says what their plugins declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright_kit.contract.abilities import Declared
from tilewright_kit.loading.loader import PluginManager
from tilewright_tools.cli.machine.operation_pages import reference_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    """Our own plugins, whatever else is installed."""
    found = PluginManager()
    found.load_entry_points()
    return found


def test_the_page_of_operations_is_what_the_plugins_declare(manager: PluginManager) -> None:
    ours = [item for plugin in manager.loaded if plugin.distribution == "tilewright" for item in plugin.operations]
    assert PAGE.read_text("utf-8") == reference_page(ours), "run: tilewright describe --page > docs/operations.md"


def test_every_operation_of_ours_declares_itself(manager: PluginManager) -> None:
    ours = [item for plugin in manager.loaded if plugin.distribution == "tilewright" for item in plugin.operations]
    assert ours and [item.name for item in ours if not isinstance(item, Declared)] == []
