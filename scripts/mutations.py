"""Run tests against hand-made mutations of the package: each must be caught by the tests that are named for it, alone.

    python scripts/mutations.py check            every `old` occurs once, and the change makes another program
    python scripts/mutations.py run [B S4 ...]   all, or those whose names begin so; 1 if one survives
    build/vllm/bin/python scripts/mutations.py run V     those of the connector, in vLLM's environment

tests/mutations.json lists them, and tests/vllm/mutations.json those named V: file, `old` and `new` text, why it matters,
and `by`, the tests. Each set of tests runs over an unchanged copy first: if that fails, a mutation's failure means
nothing. Moved code means a new `file` or `old`, never an entry less.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST, VLLM_LIST = ROOT / "tests" / "mutations.json", ROOT / "tests" / "vllm" / "mutations.json"
LEFT_OUT = shutil.ignore_patterns(".*", "build", "indexes", "runs", "*.egg-info", "__pycache__")


def mutated(mutation: dict[str, str]) -> str:
    """The file's text with the change in it. Raises ValueError."""
    text = (ROOT / mutation["file"]).read_text("utf-8")
    if (found := text.count(mutation["old"])) != 1:
        raise ValueError(f"{mutation['file']}: `old` occurs {found} times: {mutation['old']!r}")
    changed = text.replace(mutation["old"], mutation["new"])
    if mutation["file"].endswith(".py") and ast.dump(ast.parse(text)) == ast.dump(ast.parse(changed)):
        raise ValueError(f"{mutation['file']}: the mutation is the same program")
    return changed


def fails(tests: list[str], mutation: dict[str, str] | None) -> bool:
    """Whether a test fails over a copy with this mutation, or over an unchanged one. Raises ValueError."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        if mutation is not None:
            (copy / mutation["file"]).write_text(mutated(mutation), "utf-8")
        # The copy's package comes before an editable installation of the original.
        environment = {
            **os.environ,
            "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'integrations' / 'vllm'}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["--hypothesis-profile=mutations", *tests]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise ValueError(f"pytest's exit code is {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.returncode == 1


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ("check", "run"):
        print(__doc__)
        return 2
    mode, only = arguments[0], tuple(arguments[1:]) or ("",)
    problems = 0
    sound: dict[str, bool] = {}  # by tests: they pass over an unchanged copy
    listed = json.loads(LIST.read_text("utf-8"))
    if mode == "check" or only[0].startswith("V"):  # others run where vLLM is not installed
        listed += json.loads(VLLM_LIST.read_text("utf-8"))
    for mutation in listed:
        if not mutation["name"].startswith(only):
            continue
        began, tests = time.monotonic(), mutation["by"].split()
        try:
            mutated(mutation)
            outcome = "ok"
            if mode == "run":
                if mutation["by"] not in sound:
                    sound[mutation["by"]] = not fails(tests, None)
                if not sound[mutation["by"]]:
                    raise ValueError("the tests fail over an unchanged copy")
                outcome = "killed" if fails(tests, mutation) else "SURVIVED"
        except (ValueError, OSError, SyntaxError) as error:
            outcome = f"ERROR {error}"
        problems += outcome not in ("ok", "killed")
        print(
            f"{mutation['name']:5} {outcome:9} {time.monotonic() - began:5.0f} s  by {mutation['by']}",
            flush=True,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
