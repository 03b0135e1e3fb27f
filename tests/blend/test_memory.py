"""A long prompt needs little memory: no matrix of rows by keys is ever whole. By the peak of a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os
from pathlib import Path
import torch
from blendserve.blend.layout import lay_out
from blendserve.blend.prefill import blend_prefill
from blendserve.config import BlendConfig
from blendserve.core import Chunk, ChunkKV, Prompt, run
from blendserve.kernels import ops, rows
from blendserve.models.model import DecoderModel
from tests.support.toy import toy_llama
from blendserve.store.view import TensorView

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

tokens = 8_192
torch.set_num_threads(1)
ids = tuple(i % 64 for i in range(tokens))
prompt = Prompt(ids[:64], (Chunk(ids[64 : tokens // 2]), Chunk(ids[tokens // 2 : -64])), ids[-64:])
short = Prompt(ids[:64], (), ids[-64:])
for dtype, native, blocks in ((torch.bfloat16, "1", 0), (torch.float32, "0", 0), (torch.float32, "0", 2**40)):
    os.environ["BLENDSERVE_NATIVE"] = native
    ops.forget()
    adapter = DecoderModel.of(toy_llama(64, tokens, layers=2, heads=2, kv_heads=1).to(dtype))
    shape = (2, adapter.n_layers, adapter.n_kv_heads, len(prompt.chunks[1]), adapter.head_dim)
    view = TensorView(ChunkKV(*torch.zeros(shape, dtype=dtype)))
    empty = lay_out(short)
    run(blend_prefill(adapter, empty, BlendConfig()))  # allocates what stays
    if blocks:
        rows.MAX_BLOCK = rows.SCORE_BUDGET = blocks
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = peak()
    for chunks in ({}, {1: view}):  # full prefill, and half of it blended
        layout = lay_out(prompt, None, chunks)
        run(blend_prefill(adapter, layout, BlendConfig(correction="ridge")))
    print(peak() - before)
"""
LIMIT = 130_000_000  # bytes; one score matrix of 8,192 rows and keys in fp32 has 268 million


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_eight_thousand_tokens_need_less_than_half_of_one_score_matrix() -> None:
    """With kernels and in plain PyTorch; a whole matrix would be seen."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels, plain, whole = map(int, done.stdout.split())
    assert max(kernels, plain) < LIMIT < whole
