"""The kernels compile for the GPUs that they are meant for, fit into their processors, and keep to their registers.

Every combination was compiled with `python -m tests.kernels.cuda.compiling`; here those that a request meets first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia")

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may have
LARGE: dict[str, Any] = {"dtype": "bfloat16", "dim": 128, "few": False}
CALLS: list[dict[str, Any]] = [
    {"make": "attention", "options": {**LARGE, "sm": 80}},
    {"make": "attention", "options": {**LARGE, "sm": 90}},
    {"make": "attention", "options": {**LARGE, "sm": 90, "few": True, "split": True, "window": True}},
    {"make": "joining", "options": {"sm": 80}},
    {"make": "placing", "options": {"sm": 80, "aligned": True, "neighbours": False}},
]


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.cuda.compiling", json.dumps(CALLS)]
    done = subprocess.run(command, capture_output=True, text=True, env=plain, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_they_compile_and_fit(made: list[dict[str, Any]]) -> None:
    assert len(made) == len(CALLS)
    for one in made:
        assert one["shared"] <= SHARED[one["sm"]], one
        assert one["spilled"] == 0, one


def test_keys_and_values_are_read_in_whole_vectors(made: list[dict[str, Any]]) -> None:
    for one in made:
        assert one["make"] == "joining" or one["wide_loads"] > 0, one
