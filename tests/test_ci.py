""".ci/run with stand-ins for the programs that it calls."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
NEEDED = ("bash", "dirname", "env")


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
