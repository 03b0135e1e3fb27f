"""Full contexts, bits, stacked chunks, prefixes, memory; what a prefill computes is in test_differential.py."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from blendserve.blend.chunk_kv import STACK_TOKENS, ChunkComputer, placed
from blendserve.blend.prefill import PrefillPlan, blend_prefill
from blendserve.blend.prefix_cache import PrefixCache, PrefixKV
from blendserve.blend.selection import top
from blendserve.config import BlendConfig
from blendserve.core import TokenIds, run
from blendserve.kernels import selfcheck
from blendserve.kernels.cpu.isa import LEVELS
from tests.support.blending import assert_near, blend, lay, model_logits, some_ids, some_prompt
from tests.support.models import KINDS, tiny_decoder
from tests.support.stores import ROOMY

HAS_BF16 = any(selfcheck.cpu_status(level).active for level in LEVELS.values() if level.dtype == "bfloat16")


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_that_fills_the_context_to_the_last_token(name: str) -> None:
    decoder = tiny_decoder(name)
    left = decoder.context_limit - 8 - 3
    prompt = some_prompt([left - 2 * (left // 3), left // 3, left // 3], prefix=8, suffix=3)
    assert len(prompt) == decoder.context_limit
    plan = PrefillPlan.of(lay(decoder, prompt), BlendConfig(policy="all"))
    done = run(blend_prefill(decoder, plan))
    assert_near(done.logits, model_logits(decoder, prompt))


@pytest.mark.skipif(not HAS_BF16, reason="no kernels for bf16")
@pytest.mark.parametrize("name", KINDS)
def test_a_stored_prefix_changes_no_bit_where_compiled_kernels_serve(name: str) -> None:
    """A row's bits do not depend on the rows beside it."""
    decoder, prompt = tiny_decoder(name, torch.bfloat16), some_prompt([120, 9, 60], prefix=20, suffix=14)
    nothing = blend(decoder, prompt, lay(decoder, prompt, [False] * 3, prefix=False), ratio=1.0)
    prefix = blend(decoder, prompt, lay(decoder, prompt, [True, False, False]), method="prefix")
    assert torch.equal(nothing.logits, prefix.logits)


@given(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0, float("-inf")]), max_size=20), st.integers(0, 25))
def test_top_is_the_largest_and_the_earlier_of_equal_ones(scores: list[float], n: int) -> None:
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert top(torch.tensor(scores), n).tolist() == sorted(ranked[:n])


@given(st.lists(st.sampled_from([0, 1, 2, 7, 20]), max_size=6), st.integers(0, 4))
@example([400, 500, 0, 300, STACK_TOKENS + 1, 2], 3)
def test_a_chunks_kv_does_not_depend_on_what_is_stacked_with_it(lengths: list[int], prefix: int) -> None:
    computer = ChunkComputer(tiny_decoder("llama"), some_ids(prefix))
    chunks = [some_ids(n, seed=i) for i, n in enumerate(lengths)]
    for ids, stacked in zip(chunks, computer.stream(chunks), strict=True):
        alone = computer.compute([ids])[0]
        assert_near(stacked.keys, alone.keys)
        assert_near(stacked.values, alone.values)


# Prefixes: earlier turns in front of passages


@cache
def base() -> ChunkComputer:
    """After what every prompt begins with."""
    return ChunkComputer(tiny_decoder("llama"), some_ids(30, 1))


def get(kept: PrefixCache, ids: TokenIds, namespace: str = "a") -> PrefixKV:
    return run(kept.get(namespace, ids))


def test_a_prefix_has_its_own_tokens_kv() -> None:
    kept = PrefixCache(base(), ROOMY)
    ids = (*base().context, *some_ids(40, 2))
    get(kept, ids)
    other = (*ids[:-5], *some_ids(30, 3))  # another way on
    found = get(kept, other)
    assert found.reused == len(ids) - 5
    alone = placed(base().model, ChunkComputer(base().model, ()).compute([other])[0])
    assert_near(found.kv.keys, alone.keys)
    assert_near(found.kv.values, alone.values)


def test_prefixes_are_not_found_across_namespaces_and_stay_below_their_cap() -> None:
    n_base = len(base().context)
    cap = 2 * (n_base + 50) * base().model.kv_bytes_per_token
    kept = PrefixCache(base(), cap)
    one, two = ((*base().context, *some_ids(50, n)) for n in (4, 5))
    assert [get(kept, one, namespace).reused for namespace in "aba"] == [n_base, n_base, n_base + 50]
    get(kept, two)  # the cap is for two
    assert kept.n_bytes <= cap
    assert get(kept, two).reused == n_base + 50


def test_a_namespace_with_many_prefixes_pushes_out_its_own() -> None:
    n_base = len(base().context)
    kept = PrefixCache(base(), 3 * (n_base + 50) * base().model.kv_bytes_per_token)
    first, *others = ((*base().context, *some_ids(50, n)) for n in range(10, 22))
    get(kept, first, "b")
    for n, ids in enumerate(others):
        get(kept, ids, f"a\0user {n}")  # scopes are names that its clients choose
    assert get(kept, first, "b").reused == n_base + 50
    assert get(kept, others[-1], f"a\0user {len(others) - 1}").reused == n_base + 50


# Memory

SCRIPT = """
import os
from pathlib import Path
import torch
from blendserve.blend.layout import lay_out
from blendserve.core import Chunk, Prompt
from blendserve.kv import ChunkKV
from blendserve.kernels import reference
from blendserve.models.model import DecoderModel
from blendserve.store.view import TensorView
from tests.support.blending import blend
from tests.support.kernel_switches import forget
from tests.support.toy import toy_llama

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
    forget()
    adapter = DecoderModel.of(toy_llama(64, tokens, layers=2, heads=2, kv_heads=1).to(dtype))
    heads, dim, _ = adapter.kv_shapes[0]
    shape = (2, adapter.n_layers, heads, len(prompt.chunks[1]), dim)
    view = TensorView(ChunkKV(*torch.zeros(shape, dtype=dtype)))
    blend(adapter, short, lay_out(short))  # allocates what stays
    if blocks:
        reference.MAX_BLOCK = reference.SCORE_BUDGET = blocks
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = peak()
    for chunks in ({},) if blocks else ({}, {1: view}):  # full prefill, and half of it blended
        blend(adapter, prompt, lay_out(prompt, None, chunks), correction="ridge")
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
