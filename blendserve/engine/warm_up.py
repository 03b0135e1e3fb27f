"""What the first answer of a process would otherwise wait for, done when an engine opens.

Kernels are loaded and proven, races recalled, torch's primitives and threads made, memory for a prompt touched once. It
goes through the real path, over a made-up prompt of a usual length, since memory is handed out by size.
"""

from __future__ import annotations

from blendserve.blend.cost import synthetic_prompt
from blendserve.blend.prefill import blend_prefill
from blendserve.config import Config, changed
from blendserve.core import run
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.runner import append
from blendserve.registry import REUSE
from blendserve.retrieve import VectorIndex

QUESTION = "What is the question?"
FRAME = 256  # tokens of a usual prompt beside its passages
FRESH = 16  # of those, a question's
MOST = 4096  # tokens: a longer prompt takes longer by itself than anything that is done here


def warm_up(adapter: DecoderModel, config: Config, index: VectorIndex | None) -> None:
    """Search, prefill and decode once."""
    if index is not None and len(index):
        index.search(QUESTION, 1)
    passages = config.retrieve.top_k * config.retrieve.chunk_tokens
    room = min(MOST, adapter.context_limit, passages + FRAME + config.decode.max_new_tokens)
    stored = 0 if config.blend.method == "full" else min(passages, room // 2)
    prompt, layout = synthetic_prompt(adapter, min(FRESH, room // 4), stored)
    blend = changed(config.blend, method="blend", ratio=config.blend.min_ratio)
    if config.blend.method == "reuse":
        blend = changed(blend, **REUSE)
    cache = KVCache(adapter, max(room, len(prompt) + 1))
    cache.keys.zero_()
    cache.values.zero_()
    done = run(blend_prefill(adapter, prompt, layout, blend, cache=cache))
    append(adapter, done.cache, len(prompt), [int(done.logits.argmax())])
