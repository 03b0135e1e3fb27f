"""scripts/check_tests.py finds what each of its rules forbids, and nothing in a clean file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_tests.py"
FORBIDDEN = {
    "private": "store._entries",
    "prose": "with pytest.raises(ValueError, match='too large'): pass",
    "sleep": "time.sleep(1)",
    "import": "from tests.store.test_record import LIES",
}


def test_each_rule_is_found_unless_it_is_allowed(tmp_path: Path) -> None:
    file, lines = tmp_path / "test_toy.py", [*FORBIDDEN.values(), "assert self._own == store.entries"]
    for suffix, found in (("", list(FORBIDDEN)), ("  # allow: a real network", [])):
        file.write_text("".join(f"{line}{suffix}\n" for line in lines))
        done = subprocess.run([sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True)
        assert done.returncode == bool(found)
        said = [line.removeprefix(f"{file}:").split(": ")[:2] for line in done.stdout.splitlines()]
        assert said[: len(found)] == [[str(n), rule] for n, rule in enumerate(found, 1)]
