"""The tutorials, done literally on the bundled model: their answers are right, and their reports say what was reused."""

from __future__ import annotations

import re

import pytest

from scripts.strangers import visit

TUTORIALS = [f"docs/tutorial/{n}.md" for n in ("1-first-answer", "2-your-documents", "3-your-rag-chain")]
pytest.importorskip("openai")
# Nine processes. By day tests/test_docs.py runs their Python over a random model, and parses their commands.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What all three printed, in an empty folder."""
    done = visit(TUTORIALS, tmp_path_factory.mktemp("tutorials") / "empty", installs=False)
    assert done.code == 0, done.printed
    return done.printed


def outputs(printed: str, command: str) -> list[str]:
    """What each command that begins so printed."""
    return re.findall(rf"^\$ {re.escape(command)}[^\n]*\n(.*?)(?=^\$ |\Z)", printed, re.DOTALL | re.MULTILINE)


def test_1_answers_alike_by_both_methods(printed: str) -> None:
    script, _ = outputs(printed, "python")
    check_answers(script)


def check_answers(script: str) -> None:
    """Both methods answered rightly, and blending reused tokens."""
    answers = dict(re.findall(r"^(full|blend): (.*)", script, re.MULTILINE))
    assert ["hear" in answers[method] for method in ("full", "blend")] == [True, True]
    (full, none), (blended, some) = re.findall(r"blended: (\w+), (\d+) tokens reused", script)
    assert (full, none, blended) == ("False", "0", "True")
    assert int(some) > 0


def test_2_answers_alike_and_reports_what_was_reused(printed: str) -> None:
    full, blended = outputs(printed, "blendserve ask")
    assert "hear" in full
    assert "hear" in blended
    assert re.search(r"blended: [1-9]\d* tokens reused", blended)


def test_3_answers_alike_from_documents_of_the_client(printed: str) -> None:
    _, script = outputs(printed, "python")
    check_answers(script)
