"""A long prompt in little memory: no matrix of rows by keys is ever whole. In a process of its own, with a limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from pathlib import Path
import torch
from blendserve.blend import rows
from blendserve.blend.assemble import lay_out
from blendserve.blend.prefill import prefill
from blendserve.config import BlendConfig
from blendserve.core import Chunk, ChunkKV, Prompt
from blendserve.models.adapter import Adapter
from blendserve.models.toy import toy_llama
from blendserve.store.memory import MemoryChunk

tokens, blocks = 12_288, sys.argv[1]
torch.set_num_threads(1)
adapter = Adapter(toy_llama(64, tokens, layers=2, heads=2, kv_heads=1).to(getattr(torch, sys.argv[2])))
ids = tuple(i % 64 for i in range(tokens))
prompt = Prompt(ids[:64], (Chunk(ids[64:6_144]), Chunk(ids[6_144:-64])), ids[-64:])
shape = (2, adapter.n_layers, adapter.n_kv_heads, len(prompt.chunks[1]), adapter.head_dim)
view = MemoryChunk(ChunkKV(*torch.zeros(shape, dtype=adapter.dtype)))
short = Prompt(ids[:64], (), ids[-64:])
prefill(adapter, short, lay_out(short, None, [], behind_prefix=True), BlendConfig())  # allocates what is once for all
if blocks == "whole":
    rows.MAX_BLOCK = rows.SCORE_BUDGET = 2 ** 40
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000,) * 2)
for chunks in ((None, None), (None, view)):  # full prefill, and half of it blended
    layout = lay_out(prompt, None, chunks, behind_prefix=True)
    prefill(adapter, prompt, layout, BlendConfig(correction="ridge"))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twelve_thousand_tokens_need_less_than_half_of_one_score_matrix(dtype: str) -> None:
    done = run("blocks", dtype)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
def test_a_whole_score_matrix_would_not_fit() -> None:
    done = run("whole", "float32")
    assert done.returncode != 0
    assert "allocate memory" in done.stderr or "MemoryError" in done.stderr
