"""What was not tested shows: .ci/run with stand-ins for the programs that it calls, and the summary of the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
NEEDED = ("bash", "dirname", "env")
SKIPPED = """
import pytest

@pytest.mark.skip
@pytest.mark.parametrize("n", [1, 2])
def test_two(n): pass

@pytest.mark.skip
def test_one(): pass

def test_run(): pass
"""


def stand_in(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("ci", "reaches", "installs", "passes"),
    [
        ("true", True, True, True),
        ("true", True, False, False),
        ("true", False, False, True),
        ("", True, False, True),
    ],
)
def test_ci_without_chromium_fails_where_apt_works(
    ci: str, reaches: bool, installs: bool, passes: bool, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    (tmp_path / ".ci").mkdir()
    programs.mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci")
    for name in NEEDED:
        (programs / name).symlink_to(shutil.which(name) or "")
    stand_in(programs / "id", "echo 0")
    stand_in(tmp_path / ".ci" / "pythons", "true")
    stand_in(programs / "make", 'echo "$1" >> made')
    codes = {"update": not reaches, "install": not installs}
    stand_in(
        programs / "apt-get",
        "\n".join(f'[ "$1" != {word} ] || exit {code:d}' for word, code in codes.items()),
    )
    done = subprocess.run(
        [tmp_path / ".ci" / "run"], env={"PATH": str(programs), "CI": ci}, capture_output=True
    )
    assert (done.returncode == 0) == passes, done.stderr
    made = (tmp_path / "made").read_text().split()
    assert made == (["check", "test"] if passes else ["check"])


def test_the_summary_names_skipped_tests_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_toy.py").write_text(SKIPPED)
    command = f"{sys.executable} -m pytest -q -p tests.conftest -n 1 --rootdir {tmp_path} {tmp_path}"
    done = subprocess.run(command.split(), cwd=SCRIPT.parents[1], capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["2", "test_toy.py::test_two"] in lines
    assert ["1", "test_toy.py::test_one"] in lines
    assert not any("test_run" in word for line in lines for word in line)
