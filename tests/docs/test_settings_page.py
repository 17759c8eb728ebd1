"""The settings page says what the settings are."""

from __future__ import annotations

from pathlib import Path

from tilewright_server.settings import TABLE
from tilewright_server.settings.reference import reference_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def test_the_settings_page_is_what_the_table_says() -> None:
    assert PAGE.read_text("utf-8") == reference_page(), "run: python -m tilewright_server.settings > docs/settings.md"


def test_every_setting_is_explained() -> None:
    assert [row.name for row in TABLE if not row.doc.strip().endswith(".")] == []
