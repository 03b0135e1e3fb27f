"""One method on one prompt: its answer, its times, and its distributions along full prefill's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from blendserve.blend.blender import Blender
from blendserve.config import DecodeConfig
from blendserve.core import BlendReport, ChunkKV, Prompt, TokenIds
from blendserve.engine.generation import generate
from blendserve.errors import StoreError
from blendserve.evaluate.fidelity import forced
from blendserve.evaluate.methods import MethodSpec
from blendserve.models.adapter import Adapter
from blendserve.models.loader import Reader
from blendserve.timing import Clock

STAGES = ("load", "select", "correct", "prefill")
Draw = Callable[[], Prompt]


@dataclass(frozen=True, slots=True)
class Answered:
    """What one method made of one prompt."""

    tokens: TokenIds
    ended: bool  # by an end token
    logits: (
        Tensor  # [n, V] at the decisions of the reference's answer, or of its own when it is the reference
    )
    seconds: dict[str, float]  # stages, ttft (prompt laid out, prefilled, first token chosen) and decode
    recomputed: tuple[int, ...] = ()  # positions that the policy chose
    report: BlendReport | None = field(default=None)  # None for transformers' own forward


def answer(
    reader: Reader,
    blender: Blender,
    variant: MethodSpec,
    draw: Draw,
    decode: DecodeConfig,
    reference: TokenIds | None = None,
    prefix_kv: ChunkKV | None = None,
) -> Answered:
    """Prefill, decode greedily, then follow `reference`'s decisions; None = its own, as it is the reference.

    Where the reference is a text that goes on, and no answer, it may be longer than what is decoded.

    prefix_kv: of the prompt's prefix, in place of what the store has.

    `draw` lays out the prompt: it is part of the time to the first token. Raises StoreError when KV that was precomputed
    is no longer there, as another method would then be measured than the one that is named.
    """
    clock, adapter = Clock(reader.adapter.device), reader.adapter
    prompt = draw()
    with clock.stage("prefill"):
        room = max(decode.max_new_tokens, len(reference or ()))
        done = blender.run(prompt, variant.blend, room, clock, prefix_kv=prefix_kv)
    cache, first = done.result.cache, done.result.logits
    source = generate(adapter, cache, len(prompt), first, decode, reader.end_tokens)
    tokens = [token for token in [next(source, None)] if token is not None]
    ttft = clock.elapsed()
    tokens += source
    seconds = {
        **{stage: clock.seconds[stage] for stage in STAGES},
        "ttft": ttft,
        "decode": clock.elapsed() - ttft,
    }
    if done.missing and variant.kind != "full" and variant.edit is None:
        raise StoreError(
            f"{len(done.missing)} chunks left the store while method {variant} ran on them: does another process use it? "
            "Give this run a store of its own, or a larger cap_gb"
        )
    ended = len(tokens) < decode.max_new_tokens
    follow = reference if reference is not None else decisions(reader, tokens, ended)
    logits = forced(adapter, cache, len(prompt), first, follow)
    recomputed = tuple(done.result.recomputed.tolist())
    return Answered(tuple(tokens), ended, logits, seconds, recomputed, done.report)


def decisions(reader: Reader, tokens: Sequence[int], ended: bool) -> TokenIds:
    """The tokens of an answer, and one that ends it if it ended: as many decisions as were made. Never empty."""
    return (*tokens, min(reader.end_tokens)) if ended else tuple(tokens)


@torch.inference_mode()
def transformers_answer(reader: Reader, draw: Draw, decode: DecodeConfig, reference: TokenIds) -> Answered:
    """The same of transformers' own forward: what two right computations of one prompt differ by."""
    from transformers import DynamicCache

    model, clock = cast(Any, reader.adapter.model), Clock(reader.adapter.device)
    ids = draw().ids
    with clock.stage("prefill"):
        cache = DynamicCache(config=model.config)
        logits = _forward(reader.adapter, ids, cache)[-1]
    tokens, token, ttft = list[int](), int(logits.argmax()), clock.elapsed()
    while token not in reader.end_tokens:
        tokens.append(token)
        if len(tokens) == decode.max_new_tokens:
            break
        token = int(_forward(reader.adapter, (token,), cache)[-1].argmax())
    seconds = {"prefill": clock.seconds["prefill"], "ttft": ttft, "decode": clock.elapsed() - ttft}
    along = _forward(reader.adapter, (*ids, *reference[:-1]), None, keep=len(reference))
    return Answered(tuple(tokens), token in reader.end_tokens, along, seconds)


def _forward(adapter: Adapter, ids: TokenIds, cache: Any, keep: int = 1) -> Tensor:
    """The model's own logits [keep, V] after the last tokens."""
    inputs = torch.tensor([ids], device=adapter.device)
    model = cast(Any, adapter.model)
    output = model(input_ids=inputs, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep)
    return cast(Tensor, output.logits[0])
