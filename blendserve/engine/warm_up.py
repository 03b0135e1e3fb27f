"""What an engine does before its first question, so that the question does not wait for it."""

from __future__ import annotations

from blendserve.blend.blender import Blender
from blendserve.blend.cost import synthetic_prompt
from blendserve.blend.prefill import PrefillPlan, blend_prefill
from blendserve.config import Config
from blendserve.core import TokenIds, run
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.runner import append
from blendserve.registry import FULL_REUSE
from blendserve.retrieve import VectorIndex

FRAME_TOKENS = 256  # tokens of a usual prompt beside its passages
QUESTION_TOKENS = 16
MAX_TOKENS = 4096  # a longer prompt takes longer than all that a warm-up saves


def warm_up(
    config: Config, decoder: DecoderModel, blender: Blender, prefix: TokenIds, index: VectorIndex | None
) -> None:
    """Search, prefill and decode once: loads and verifies kernels, starts threads, touches memory.

    The prompt is synthetic and of a usual length, as memory is allocated by size.
    """
    if index is not None and len(index):
        index.search("What is the question?", 1)
    passages = config.retrieve.top_k * config.retrieve.chunk_tokens
    usual = passages + FRAME_TOKENS + config.decode.answer_tokens
    room = min(MAX_TOKENS, decoder.context_limit, usual)
    n_stored = 0 if config.blend.method == "full" else min(passages, room // 2)
    layout = synthetic_prompt(decoder, min(QUESTION_TOKENS, room // 4), n_stored)
    options = FULL_REUSE if config.blend.method == "reuse" else {}
    blend = config.blend.with_values(method="blend", **options)
    cache = KVCache(decoder, max(room, layout.n_tokens + 1))
    cache.fill(0.0)
    done = run(blend_prefill(decoder, PrefillPlan.of(layout, blend), cache))
    append(decoder, done.cache, layout.n_tokens, [int(done.logits.argmax())])
    run(blender.prefixes.get(config.store.namespace, prefix))
