"""Links between the documents, and from them to files of the repository, lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {Path(link).name for link in LINK.findall((ROOT / "README.md").read_text("utf-8"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= linked
