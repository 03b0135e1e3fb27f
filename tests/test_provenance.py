"""Where figures come from: the CPU, the versions, and the commit that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from blendserve import provenance

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) 6975P-C
flags\t\t: fpu sse2 avx avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
flags\t\t: none
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16 sve\n"
AMX = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


@pytest.mark.parametrize(
    ("text", "cpu", "sets"),
    [
        (XEON, "Intel(R) Xeon(R) 6975P-C", AMX),
        (ARM, "", ("asimd", "i8mm", "bf16", "sve")),
        ("", "", ()),
        (None, "", ()),
    ],
)
def test_the_cpu_is_the_one_the_system_names(
    text: str | None, cpu: str, sets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert tuple(provenance.machine()["instruction_sets"]) == sets
    assert provenance.cpu_name()  # of another source if the file has none
    assert cpu in provenance.cpu_name()


def test_the_commit_is_of_this_code_and_of_no_checkout_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*command: str) -> str:
        line = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *command]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()

    file, commit = tmp_path / "provenance.py", provenance.commit.__wrapped__
    file.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(file))
    assert commit() == ""
    git("init", "--quiet")
    git("commit", "--allow-empty", "--quiet", "-m", "of something else")
    assert commit() == ""
    git("add", ".")
    git("commit", "--quiet", "-m", "this")
    assert commit() == git("rev-parse", "--short=12", "HEAD")
    file.write_text("changed")
    assert commit().endswith("+")
