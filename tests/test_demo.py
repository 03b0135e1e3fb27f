"""The demo on a tiny random model: what each method computes, and no optional package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from blendserve import demo
from blendserve.config import check_binding
from blendserve.serve import server
from tests.bench.conftest import write_shape

PROGRAM = """
import sys
from pathlib import Path
from blendserve import demo
demo.CHARACTERS = 20_000
rows = demo.run(Path("index"), sys.argv[1])
print("rows:", *(row.tokens_run for row in rows))
print("imported:", *(name for name in ("ray", "constriction", "sentence_transformers") if name in sys.modules))
"""


def test_the_demo_compares_both_methods(tmp_path: Path) -> None:
    model = write_shape(tmp_path, vocab_size=49_152, max_position_embeddings=8192)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", PROGRAM, model]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (rows,) = re.findall(r"^rows: (.*)", done.stdout, flags=re.MULTILINE)
    transformers, full_prefill, prefix, reuse, blend = map(int, rows.split())
    assert transformers == full_prefill > prefix > blend > reuse > 0
    assert re.findall(r"^imported:(.*)", done.stdout, flags=re.MULTILINE) == [""]


@pytest.mark.parametrize(("host", "own"), [("127.0.0.1", ""), ("0.0.0.0", ""), ("0.0.0.0", "sk-own")])
def test_the_page_needs_a_key_where_others_reach_it(
    host: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one, which the printed URL has, unless the environment has one."""
    run, engine = Mock(), nullcontext(SimpleNamespace(index=SimpleNamespace(name="demo")))
    monkeypatch.setattr(server, "run", run)
    monkeypatch.setattr(demo, "open_demo", lambda *_: engine)
    monkeypatch.delenv("BLENDSERVE_API_KEY", raising=False)
    if own:
        monkeypatch.setenv("BLENDSERVE_API_KEY", own)
    demo.serve_page(Path("demo"), "a model", host, 0)
    _, _, http, key = run.call_args.args
    check_binding(http)
    used: Any = http.api_key.get_secret_value() if http.api_key else ""
    assert (bool(key), used) == (host != "127.0.0.1" and not own, own or key)
    assert not key or len(key) > 30
