"""The README's first example runs as written; what it names is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs_as_written(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 11
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert re.search(r"[1-9]\d* tokens reused", done.stdout), done.stdout


def test_links_and_configs_exist() -> None:
    from blendserve.serve.config import load_settings

    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for file in (ROOT / "configs").glob("*.yaml"):
        load_settings(file)


def test_options_that_it_names_exist() -> None:
    pages = [(ROOT / "docs" / "reference" / name).read_text() for name in ("cli-user.md", "cli-research.md")]
    known = set(re.findall(r"--[a-z][\w-]+", "".join(pages)))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", README)) - known == {"--no-deps"}  # pip's
