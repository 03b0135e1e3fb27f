"""Earlier turns in front of passages: their KV is found, not computed, and never another tenant's."""

from __future__ import annotations

from functools import cache

import torch

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.blend.prefix_cache import PrefixCache, PrefixKV
from blendserve.core import TokenIds, run
from blendserve.engine.engine import Engine
from tests.support.engines import PASSAGES, toy_engine, toy_reader

ROOMY = 2**30


@cache
def engine() -> Engine:
    made = toy_engine()
    made.precompute(PASSAGES)
    return made


@cache
def base() -> ChunkComputer:
    """After what every prompt begins with."""
    return ChunkComputer(toy_reader().adapter, engine().prompts.prefix)


def get(kept: PrefixCache, ids: TokenIds, namespace: str = "a") -> PrefixKV:
    return run(kept.get(namespace, ids))


def test_a_prefix_has_its_own_tokens_kv() -> None:
    kept = PrefixCache(base(), ROOMY)
    ids = (*base().context, *range(500, 540))
    get(kept, ids)
    other = (*ids[:-5], *range(900, 930))  # another way on
    found = get(kept, other)
    assert found.reused == len(ids) - 5
    alone = ChunkComputer(toy_reader().adapter, ()).compute([other])[0]
    torch.testing.assert_close(found.kv.keys, alone.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.kv.values, alone.values, atol=1e-4, rtol=1e-4)


def test_prefixes_are_not_found_across_namespaces_and_stay_below_their_cap() -> None:
    n_base = len(base().context)
    cap = 2 * (n_base + 50) * toy_reader().adapter.kv_bytes_per_token
    kept = PrefixCache(base(), cap)
    one, two = ((*base().context, *range(n, n + 50)) for n in (500, 700))
    assert [get(kept, one, namespace).reused for namespace in "aba"] == [n_base, n_base, n_base + 50]
    get(kept, two)  # the cap is for two, and "b"'s was used longest ago
    assert kept.n_bytes <= cap
    assert get(kept, one, "b").reused == n_base
