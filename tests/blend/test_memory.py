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

tokens = 8_192
torch.set_num_threads(1)
adapter = Adapter(toy_llama(64, tokens, layers=2, heads=2, kv_heads=1).to(getattr(torch, sys.argv[1])))
ids = tuple(i % 64 for i in range(tokens))
prompt = Prompt(ids[:64], (Chunk(ids[64 : tokens // 2]), Chunk(ids[tokens // 2 : -64])), ids[-64:])
shape = (2, adapter.n_layers, adapter.n_kv_heads, len(prompt.chunks[1]), adapter.head_dim)
view = MemoryChunk(ChunkKV(*torch.zeros(shape, dtype=adapter.dtype)))
short = Prompt(ids[:64], (), ids[-64:])
prefill(adapter, short, lay_out(short, None, [], behind_prefix=True), BlendConfig())  # allocates what is once for all
for blocks in sys.argv[2:]:
    if blocks == "whole":
        rows.MAX_BLOCK = rows.SCORE_BUDGET = 2 ** 40
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident now
    before = peak()
    for chunks in ((None, None), (None, view)):  # full prefill, and half of it blended
        layout = lay_out(prompt, None, chunks, behind_prefix=True)
        prefill(adapter, prompt, layout, BlendConfig(correction="ridge"))
    print(peak() - before)
"""
LIMIT = 130_000_000  # bytes; one score matrix of 8,192 rows and keys in fp32 has 268 million


def grown(dtype: str, *blocks: str, **environment: str) -> list[int]:
    """Bytes by which the peak of resident memory grew each time, whatever else libraries reserve."""
    command = [sys.executable, "-c", SCRIPT, dtype, *blocks]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_eight_thousand_tokens_need_less_than_half_of_one_score_matrix_and_a_whole_one_would_be_seen() -> (
    None
):
    in_blocks, whole = grown("float32", "blocks", "whole", BLENDSERVE_NATIVE="0")
    assert in_blocks < LIMIT < whole


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_so_they_do_with_kernels() -> None:
    (in_blocks,) = grown("bfloat16", "blocks", BLENDSERVE_NATIVE="1")
    assert in_blocks < LIMIT
