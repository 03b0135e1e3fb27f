"""Where figures come from: what a system says of its CPU, whichever it is, and the commit that runs."""

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


@pytest.mark.parametrize(
    ("text", "name", "sets"),
    [
        (
            XEON,
            "Intel(R) Xeon(R) 6975P-C",
            ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
        ),
        (ARM, None, ("asimd", "i8mm", "bf16", "sve")),
        ("", None, ()),
    ],
)
def test_the_cpu_is_what_the_system_says(
    text: str, name: str | None, sets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "CPUINFO", tmp_path / "cpuinfo")
    for content in (text, None):
        if content is None:
            (tmp_path / "cpuinfo").unlink()
            name, sets = None, ()
        else:
            (tmp_path / "cpuinfo").write_text(content)
        assert provenance.instruction_sets() == sets
        assert provenance.cpu_name()  # of something else, where the system does not say
        if name:
            assert provenance.cpu_name() == name


def test_a_machine_is_told_in_one_line() -> None:
    facts = provenance.machine()
    line = provenance.describe(facts)
    assert facts["cpu"] in line
    assert all(name in line for name in facts["instruction_sets"])
    assert "\n" not in line
    assert provenance.environment()["machine"] == line


def test_versions_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(provenance, "PACKAGES", ("torch", "no-such-package"))
    found = provenance.versions()
    assert (
        torch.__version__.split("+")[0] == found["torch"].split("+")[0]
    )  # what it was built for need not be told
    assert found["no-such-package"] == ""


def test_the_commit_is_of_this_code_and_of_no_checkout_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit_of(file: Path) -> str:
        monkeypatch.setattr(provenance, "__file__", str(file))
        provenance.commit.cache_clear()
        return provenance.commit()

    def git(*command: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *command], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    file = tmp_path / "provenance.py"
    file.write_text("")
    try:
        assert commit_of(file) == ""
        git("init", "--quiet")
        git("commit", "--allow-empty", "--quiet", "-m", "of something else")
        assert commit_of(file) == ""
        git("add", ".")
        git("commit", "--quiet", "-m", "this")
        assert commit_of(file) == git("rev-parse", "--short=12", "HEAD")
        file.write_text("changed")
        assert commit_of(file).endswith("+")
    finally:
        provenance.commit.cache_clear()
