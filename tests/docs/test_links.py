"""Links between the documents, and from them to files of the repository, lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SOURCE = re.compile(r"`((?:arch|client|emulator|native|plugins|proto|server|tools|bench|tests)/[\w./-]+\.\w+)`")
IMAGINED = {"arch/tilewright_arch/specs/gfx1250.json", "server/tilewright.sock"}
"""Paths that a reader is shown how to make, or that are on a server."""
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_sources_that_a_page_names_are_there(page: Path) -> None:
    named = SOURCE.findall(page.read_text("utf-8"))
    assert [path for path in named if not (ROOT / path).exists() and path not in IMAGINED] == []


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {Path(link).name for link in LINK.findall((ROOT / "README.md").read_text("utf-8"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= linked
