"""scripts/check_tests.py finds what each of its rules forbids, and nothing in a clean file."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_tests import main

FORBIDDEN = {
    "private": "store._entries",
    "prose": "with pytest.raises(ValueError, match='too large'): pass",
    "sleep": "time.sleep(1)",
    "import": "from tests.store.test_record import LIES",
}


@pytest.mark.parametrize("rule", [*FORBIDDEN, ""])
def test_each_rule_is_found_unless_it_is_allowed(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_toy.py"
    for suffix, code in (("", int(bool(rule))), ("  # allow: a real network", 0)):
        file.write_text(f"{FORBIDDEN.get(rule, 'assert self._own == store.entries')}{suffix}\n")
        assert main([str(file)]) == code
        assert capsys.readouterr().out.startswith(f"{file}:1: {rule}: ") == bool(code)
