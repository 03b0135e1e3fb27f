"""scripts/check_tests.py finds what each of its rules forbids, and nothing in a clean file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_tests.py"
FORBIDDEN = {
    "private": "store._entries",
    "prose": "with pytest.raises(ValueError, match='too large'): pass",
    "sleep": "time.sleep(1)",
    "import": "from tests.store.test_record import LIES",
}


@pytest.mark.parametrize("rule", [*FORBIDDEN, ""])
def test_each_rule_is_found_unless_it_is_allowed(rule: str, tmp_path: Path) -> None:
    file = tmp_path / "test_toy.py"
    for suffix, code in (("", int(bool(rule))), ("  # allow: a real network", 0)):
        file.write_text(f"{FORBIDDEN.get(rule, 'assert self._own == store.entries')}{suffix}\n")
        done = subprocess.run([sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True)
        assert done.returncode == code
        assert done.stdout.startswith(f"{file}:1: {rule}: ") == bool(code)
