"""A long prompt in little memory: no matrix of rows by keys is ever whole. In a process of its own, by its peak."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch
from blendserve.blend.layout import lay_out
from blendserve.blend.prefill import prefill
from blendserve.config import BlendConfig
from blendserve.core import Chunk, ChunkKV, Prompt
from blendserve.kernels import rows
from blendserve.models.adapter import Adapter
from blendserve.models.toy import toy_llama
from blendserve.store.memory import MemoryChunk

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

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
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
before = peak()
for chunks in ((None, None), (None, view)):  # full prefill, and half of it blended
    layout = lay_out(prompt, None, chunks, behind_prefix=True)
    prefill(adapter, prompt, layout, BlendConfig(correction="ridge"))
print(peak() - before)
"""
LIMIT = 300_000_000  # bytes; one score matrix of 12,288 rows and keys in fp32 has 604 million


def grown(blocks: str, dtype: str, **environment: str) -> int:
    """Bytes by which the peak of resident memory grew, whatever else libraries reserve."""
    command = [sys.executable, "-c", SCRIPT, blocks, dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
@pytest.mark.parametrize(("dtype", "kernels"), [("float32", "0"), ("bfloat16", "1")])
def test_twelve_thousand_tokens_need_less_than_half_of_one_score_matrix(dtype: str, kernels: str) -> None:
    assert grown("blocks", dtype, BLENDSERVE_NATIVE=kernels) < LIMIT


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_whole_score_matrix_would_be_seen() -> None:
    assert grown("whole", "float32", BLENDSERVE_NATIVE="0") > LIMIT
