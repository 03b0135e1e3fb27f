"""The demo goes through its steps in order, on a tiny random model, and uses nothing that it does not need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import BASE

PROGRAM = """
import sys
from pathlib import Path
from blendserve import demo
rows = demo.run(Path("index"), sys.argv[1])
print("rows:", *(row.tokens_run for row in rows))
print("imported:", *(name for name in ("ray", "constriction", "sentence_transformers") if name in sys.modules))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the demo prints, in a process of its own."""
    folder = tmp_path_factory.mktemp("demo")
    shape = {**BASE, "model_type": "llama", "vocab_size": 49_152, "max_position_embeddings": 8192}
    shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(shape))
    command = [sys.executable, "-c", PROGRAM, f"random:{folder}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_steps_come_in_order_and_the_baseline_before_the_cache(printed: str) -> None:
    assert re.findall(r"^(\d)/5", printed, flags=re.MULTILINE) == list("12345")
    first = [
        printed.index(part)
        for part in ("3/5", "full prefill:", "4/5", "5/5", "blended:", "First blended answer")
    ]
    assert first == sorted(first)


def test_every_question_is_answered_by_both_methods(printed: str) -> None:
    assert len(re.findall(r"^ +full prefill:", printed, flags=re.MULTILINE)) == 3
    assert len(re.findall(r"^ +blended:", printed, flags=re.MULTILINE)) == 3
    assert len(re.findall(r"times sooner; [\d,]+ of [\d,]+ tokens recomputed", printed)) == 3


def test_fewer_tokens_run_where_more_is_reused(printed: str) -> None:
    transformers, full, prefix, reuse, blend = map(int, re.findall(r"rows: (.*)", printed)[0].split())
    assert transformers == full > prefix > blend > reuse > 0


def test_it_needs_no_optional_package(printed: str) -> None:
    assert re.findall(r"imported:(.*)", printed) == [""]
