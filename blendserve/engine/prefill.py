"""Plan -> Prefill: the prompt is read, by blending or by the borrowed model itself, and an answer can begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from blendserve.blend.blender import Blender
from blendserve.blend.explain import explain_plain
from blendserve.blend.report import plain_report
from blendserve.core import BlendReport, ChunkKV, Explanation, Steps, TokenIds
from blendserve.engine.prefix_cache import PrefixKV
from blendserve.engine.request import Plan
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.reference import OwnDecoding
from blendserve.models.replay import Step, decoding_steps


@dataclass(frozen=True, slots=True)
class Prefill:
    """A plan whose answer can begin."""

    report: BlendReport
    explanation: Explanation
    logits: Tensor  # [V], for the first new token
    run: Step  # for a caller who makes every further token alone
    cached: int = 0  # tokens of the prompt whose KV was there already
    missing: tuple[TokenIds, ...] = ()  # chunks that the store was asked for and did not have whole
    computed: Mapping[TokenIds, ChunkKV] = field(
        default_factory=dict
    )  # of those, what was computed all the same


def prefill(
    plan: Plan,
    blender: Blender,
    cache: KVCache | None = None,
    prefix_kv: Steps[PrefixKV] | None = None,
) -> Steps[Prefill]:
    """By `plan.blend`. cache: the caller's own, of at least `plan.tokens`. prefix_kv: by default the store is asked."""
    with plan.clock.stage("prefill"):
        prefix = (yield from prefix_kv) if prefix_kv else None
        kv = prefix.kv if prefix else None
        done = yield from blender.prefill(
            plan.prompt, plan.blend, plan.decode.max_new_tokens, plan.clock, cache, kv
        )
    report = done.report
    cached = report.tokens_exact + report.tokens_reused
    if prefix and report.method != "full":
        cached = max(0, cached - len(plan.prompt.prefix) + prefix.reused)  # 0: the store could not be read
    made = plan.decode.max_new_tokens
    run = decoding_steps(blender.adapter, done.result.cache, len(plan.prompt), made)
    return Prefill(report, done.explanation, done.result.logits, run, cached, done.missing, done.computed)


def prefill_by_model(plan: Plan, adapter: DecoderModel, why: str) -> Prefill:
    """By the borrowed model's own forward and cache, for a reader that may not blend because of `why`."""
    own = OwnDecoding(adapter)
    with plan.clock.stage("prefill"):
        logits = own.feed(plan.prompt.ids)
    report = plain_report(plan.prompt, plan.blend, why)
    return Prefill(report, explain_plain(plan.prompt, why), logits, lambda _, token: own.feed((token,)))
