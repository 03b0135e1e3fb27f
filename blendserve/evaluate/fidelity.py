"""One method on one prompt: its answer, its times, and how near it is to full prefill, without any label.

Full prefill answers greedily; every other method is asked, over its own cache, for its distribution at each decision of
that answer:

    KL(full || method) at   the prompt's end | answer token 1 | ... | answer token n      (the last one decides to stop)

The first of them is the first-token KL, their mean the mean KL, in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from blendserve.blend.blender import Blender
from blendserve.config import DecodeConfig
from blendserve.core import BlendReport, Prompt, TokenIds, run
from blendserve.engine.generate import generate
from blendserve.errors import StoreError
from blendserve.evaluate.methods import FULL, MethodSpec
from blendserve.kv import ChunkKV
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.reference import OwnDecoding
from blendserve.models.runner import append_each, decode_each
from blendserve.quality.fidelity import forced, with_end
from blendserve.timing import Clock

STAGES = ("load", "select", "correct", "prefill", "refine")
Draw = Callable[[], Prompt]  # lays out the prompt, tokenising it; part of TTFT


@dataclass(frozen=True, slots=True)
class Generation:
    """What one method generated."""

    tokens: TokenIds  # without an end token
    logits: Tensor  # [n, V] at the n reference tokens; of the reference, at its own
    # Stages, ttft (prompt laid out, prefilled, first token chosen), decode, gap (the second token's part of decode).
    seconds: dict[str, float]
    recomputed: tuple[int, ...] = ()  # positions that the policy selected
    report: BlendReport | None = None  # None: transformers


def answer(
    model: LoadedModel,
    blender: Blender,
    method: MethodSpec,
    draw: Draw,
    decode: DecodeConfig,
    reference: TokenIds | None = None,
    prefix_kv: ChunkKV | None = None,
) -> Generation:
    """Prefill, decode greedily, then compute the logits at the tokens of `reference`; None: at its own tokens.

    prefix_kv: in place of the cached prefix. Raises StoreError when precomputed KV has left the store: another method
    would be measured.
    """
    clock = Clock(model.decoder.device)
    decoder = model.decoder
    prompt = draw()
    with clock.stage("prefill"):
        room = max(decode.answer_tokens, len(reference or ()))  # a text to continue may be longer
        done = blender.run(prompt, method.blend, KVCache(decoder, len(prompt) + room), clock, prefix_kv)
    cache = done.result.cache
    first = done.result.logits
    source = generate(decoder, cache, len(prompt), first, decode, model.end_tokens)
    begin = tuple(islice(source, 1))
    ttft = clock.elapsed()
    refined = done
    if len(done.to_refine):
        with clock.stage("refine"):
            refined = run(done.refine(decoder, prompt.ids))
    begin = (*begin, *islice(source, 1))
    gap = clock.elapsed() - ttft
    tokens = (*begin, *source)
    seconds = {stage: clock.seconds[stage] for stage in STAGES}
    seconds |= {"ttft": ttft, "gap": gap, "decode": clock.elapsed() - ttft}
    n_missing = len(done.missing) or prompt.is_plain * done.report.chunks_missing
    if n_missing and method.kind != FULL and method.edit is None:
        raise StoreError(
            f"{n_missing} chunks left the store while method {method} ran on them: give this run a store that no "
            "other process uses, or a larger cap_gb"
        )
    follow = reference if reference is not None else with_end(model, tokens, decode)
    step = append_each if method.kind == FULL else decode_each  # int8 decoding is compared with full prefill
    logits = forced(decoder, cache, len(prompt), first, follow, step)
    return Generation(tokens, logits, seconds, tuple(done.result.recomputed.tolist()), refined.report)


def transformers_answer(
    model: LoadedModel, draw: Draw, decode: DecodeConfig, reference: TokenIds
) -> Generation:
    """The same by transformers' own forward: the rounding difference of two exact computations."""
    own = OwnDecoding(model.decoder)
    along = OwnDecoding(model.decoder)
    clock = Clock(model.decoder.device)
    ids = draw().ids
    tokens: list[int] = []
    with clock.stage("prefill"):
        logits = own.feed(ids)
    token = int(logits.argmax())
    ttft = clock.elapsed()
    while token not in model.end_tokens:
        tokens.append(token)
        if len(tokens) == decode.answer_tokens:
            break
        token = int(own.feed((token,)).argmax())
    seconds = {"prefill": clock.seconds["prefill"], "ttft": ttft, "decode": clock.elapsed() - ttft}
    forced_logits = torch.stack([along.feed(ids), *(along.feed((token,)) for token in reference[:-1])])
    return Generation(tuple(tokens), forced_logits, seconds)


def nll(logits: Tensor, ids: Sequence[int]) -> float:
    """Mean negative log-likelihood, in nats, of the tokens `ids` [n] by logits [n, V]."""
    chosen = torch.tensor(ids, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.double(), chosen))
