"""`blendserve bench decode`: seconds a token behind a long context, against transformers' own generate.

Both run greedily and the same number of tokens. The first token comes out of prefill; what is timed lies between it and
the last one, so prefill has no part in it and nothing has to be subtracted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import torch

from blendserve.bench.config import DecodeBenchConfig
from blendserve.bench.figures import Figures, Update, interleaved, ratios, spread
from blendserve.bench.machine import where
from blendserve.bench.workload import check_room, make_workload
from blendserve.blend.layout import lay_out
from blendserve.blend.prefill import PassResult, blend_prefill
from blendserve.config import BlendConfig, DecodeConfig
from blendserve.core import Prompt, TokenIds, run
from blendserve.engine.generation import generate
from blendserve.models.adapter import Adapter
from blendserve.models.loader import load_reader
from blendserve.timing import Clock

Say = Callable[[str], None]
OURS, THEIRS = "blendserve", "transformers"


@dataclass(frozen=True, slots=True)
class Decoded:
    """One run: the tokens, and when each was there."""

    tokens: TokenIds
    seconds: tuple[float, ...]

    @property
    def per_token(self) -> float:
        """Seconds a token, from the second to the last."""
        return (self.seconds[-1] - self.seconds[0]) / (len(self.seconds) - 1)


def measure(
    config: DecodeBenchConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises InputError, ModelError."""
    reader = load_reader(config.reader, say)
    adapter, n = reader.adapter, config.new_tokens
    check_room(reader, config.context + n, f"a context of {config.context:,} and {n:,} new")
    ids = make_workload(reader, 1, config.context, None, config.seed).chunks[0]
    done = prefilled(adapter, ids, n)
    calls = {
        THEIRS: lambda: run_generate(adapter, ids, n),
        OURS: lambda: run_ours(adapter, done, len(ids), n),
    }
    runs = interleaved(calls, config.repeats, update)
    seconds = {name: [run.per_token for run in runs[name]] for name in runs}
    return {
        "bench": "decode",
        **where(config, reader),
        "seconds_per_token": {name: spread(values) for name, values in seconds.items()},
        "faster_than_transformers": ratios(seconds[THEIRS], seconds[OURS]),
        "tokens_agreeing": agreeing(runs[THEIRS][0].tokens, runs[OURS][0].tokens),
    }


def run_ours(adapter: Adapter, done: PassResult, length: int, n: int) -> Decoded:
    """Our loop over a prefilled cache, whose room behind `length` is written over each time."""
    clock = Clock(adapter.device)
    config = DecodeConfig(max_new_tokens=n)
    stamped = [
        (token, clock.elapsed())
        for token in generate(adapter, done.cache, length, done.logits, config, frozenset())
    ]
    return Decoded(tuple(t for t, _ in stamped), tuple(at for _, at in stamped))


def run_generate(adapter: Adapter, ids: TokenIds, n: int) -> Decoded:
    """transformers' generate, prompt included."""
    stamps = _Stamps(Clock(adapter.device))
    inputs = torch.tensor([ids], device=adapter.device)
    cast(Any, adapter.model).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        streamer=stamps,
    )
    return Decoded(tuple(stamps.tokens), tuple(stamps.seconds))


def agreeing(one: TokenIds, other: TokenIds) -> int:
    """Tokens that are equal before the first that is not: bf16 may part ways without anybody being wrong."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))


class _Stamps:
    """What generate calls a streamer: notes when each token comes."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._prompt_seen = clock, False
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_seen:
            self.tokens.append(int(tokens))
            self.seconds.append(self._clock.elapsed())
        self._prompt_seen = True  # the prompt is streamed first

    def end(self) -> None:
        return


def prefilled(adapter: Adapter, ids: TokenIds, n: int) -> PassResult:
    """A full prefill whose cache has room for n new tokens."""
    prompt = Prompt((), (), ids)
    return run(
        blend_prefill(adapter, prompt, lay_out(prompt, None, [], behind_prefix=True), BlendConfig(), n)
    )
