"""docs/reference/models.md says what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "families_table.py"))["page"]()
    told = "run scripts/families_table.py > docs/reference/models.md"
    assert (ROOT / "docs" / "reference" / "models.md").read_text() == page, told
