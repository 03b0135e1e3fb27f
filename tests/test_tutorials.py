"""The tutorials, done literally on the bundled model: their answers are right, and their reports say what was reused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.strangers import visit

TUTORIALS = [f"docs/tutorial/{n}.md" for n in ("1-first-answer", "2-your-documents", "3-your-rag-chain")]
pytest.importorskip("openai")


# Nine processes. By day tests/test_docs.py runs their Python over a random model, and parses their commands.
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_answer_is_right_and_blending_reuses_tokens(tmp_path: Path) -> None:
    done = visit(TUTORIALS, tmp_path / "empty", installs=False)
    assert done.code == 0, done.printed
    answers = re.findall(r"^(full|blend): (.*)", done.printed, re.MULTILINE)
    assert [(method, "hear" in text) for method, text in answers] == [("full", True), ("blend", True)] * 2
    reports = re.findall(r"^  blended: (\w+), (\d+) tokens reused", done.printed, re.MULTILINE)
    assert [(blended, int(n) > 0) for blended, n in reports] == [("False", False), ("True", True)] * 2
    asked = re.findall(r"^\$ blendserve ask[^\n]*\n(.*?)(?=^\$ )", done.printed, re.DOTALL | re.MULTILINE)
    assert ["hear" in printed for printed in asked] == [True, True]
    assert re.search(r"blended: [1-9]\d* tokens reused", asked[1])
