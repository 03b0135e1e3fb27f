"""Run tokens behind what caches hold: by one native call, by the layer loop, or on a GPU by a CUDA graph.

Native call: where a model's forms have kernels (native.py), a step is one call. It gives the loop's bits where that runs
the same kernels; where its linear layers or attention are torch's, as in fp32, or AMX's, they sum in another order, and
the numbers are equal to rounding. The first step of a model runs both and compares them.

CUDA graph: a step is hundreds of kernels that take a GPU less time than the host takes to launch them. A graph has fixed
addresses, so one graph runs the rows of all caches: a row more costs next to nothing, as a step's time goes into reading
the weights. A cache without a row in a step runs token 0 at position 0 and writes to its last place, which is never read:
no answer's last token is ever run. The first steps are run plainly: a short answer does not wait for a capture, and what
is compiled, verified or allocated at a first time is done then. Where a step cannot be captured, decoding stays plain.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from blendserve.errors import ConfigError
from blendserve.kernels.cpu.decoder import MAX_ROWS, NativeLayers, int8_copy, unsupported
from blendserve.kernels.cuda.graphs import Capture, CudaGraph, Replayed
from blendserve.kernels.selfcheck import widest
from blendserve.kv import Layers, map_layers, stacked
from blendserve.models.forward import Row, run_captured, run_rows
from blendserve.models.kv_cache import KVCache, slots
from blendserve.models.model import DecoderModel
from blendserve.models.native import native_weights
from blendserve.models.thread_tuner import Series, ThreadTuner

CHECKED = (0, 299)  # positions of the comparison with the layer loop
OWN_TOKENS = 23  # whose KV is repeated before them: no block of a kernel has as many
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # of the largest logit
INT8_TOLERANCE = 0.2  # of int8 weights or inputs, at the first position

EAGER_STEPS = 4  # before the capture, which costs about as much as three of them
MIN_NEW_TOKENS = 16  # of an answer for which a capture may pay
MAX_CACHES = 16  # of one graph: each attends alone, in use or not

log = logging.getLogger(__name__)


class NativeDecoder:
    """A model's decoding steps by native calls. One thread at a time."""

    def __init__(self, model: DecoderModel, native: NativeLayers) -> None:
        self._model = model
        self._native = native
        self._tables = model.rope_tables[1]
        self._series = Series(ThreadTuner())

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """Run up to MAX_ROWS tokens, of one request or of several, append their KV -> logits [B, V]."""
        model = self._model
        hidden = cast(Tensor, model.embed(torch.tensor([row.token for row in rows])))
        ropes = model.rope(torch.tensor([row.at for row in rows]))
        tables = [ropes[l] for l in self._tables]
        caches = [(stacked(row.cache.keys), stacked(row.cache.values), row.at) for row in rows]
        return model.scale_logits(self._series.run(lambda: self._native.decode(hidden, tables, caches)))


def native_decoder(model: DecoderModel, in_int8: bool = False) -> tuple[NativeDecoder | None, str]:
    """The decoder and what it runs, or None and the reason why the layer loop decodes; made once for each model.

    in_int8: over a copy of the weights in int8, or over quantised weights with inputs in int8.
    """
    if in_int8 not in model.native_decoders:
        model.native_decoders[in_int8] = _bind(model, in_int8)
    found: tuple[NativeDecoder | None, str] = model.native_decoders[in_int8]
    return found


def _bind(model: DecoderModel, in_int8: bool) -> tuple[NativeDecoder | None, str]:
    if model.device.type != "cpu":
        return None, f"the model is on {model.device}"
    level = widest("decode_step", model.dtype)
    if level is None:
        return None, f"no native kernels for {model.dtype} on this CPU"
    try:
        weights = native_weights(model)
    except ValueError as missing:
        return None, str(missing)
    rounds_inputs = in_int8 and weights.has_quantised
    copies_weights = in_int8 and not weights.has_quantised
    if reason := unsupported(level, weights, copies_weights):
        return None, reason
    weights = int8_copy(weights, level) if copies_weights else weights
    decoder = NativeDecoder(model, NativeLayers(level, weights, model.rope_tables[0], rounds_inputs))
    error = _difference(model, decoder, CHECKED[:1] if in_int8 else CHECKED)
    if not error <= (INT8_TOLERANCE if in_int8 else TOLERANCE[model.dtype]):
        return None, f"logits differ from the layer loop's by {error:.2g} of the largest"
    return decoder, f"one {level.title} call a step" + (" over int8 weights" if copies_weights else "")


@torch.inference_mode()
def _difference(model: DecoderModel, decoder: NativeDecoder, positions: Sequence[int]) -> float:
    """Largest difference to the layer loop's logits and KV, as a share of the largest number.

    The KV before is the model's own, of a few tokens again and again. Over random KV, steps that are right differ by up
    to two thirds in bfloat16, as the layers enlarge what is rounded.
    """
    last = min(CHECKED[-1], model.context_limit - 1)
    mine, other = (KVCache(model, last + 1) for _ in range(2))
    worst = 0.0
    pairs = [(stacked(a), stacked(b)) for a, b in ((mine.keys, other.keys), (mine.values, other.values))]
    n_own = min(OWN_TOKENS, last)
    run_rows(model, [Row(other, at, at % model.vocab_size) for at in range(n_own)])
    for part, copy in pairs:
        copy.copy_(copy[:, :, torch.arange(last + 1) % n_own])
        part.copy_(copy)
    for position in positions:
        at = min(position, last)
        logits = decoder([Row(mine, at, 1 + at % 7)]), run_rows(model, [Row(other, at, 1 + at % 7)])
        for got, expected in (logits, *pairs):
            error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
            worst = max(worst, error if bool(torch.isfinite(got).all()) else float("inf"))
    return worst


def append(model: DecoderModel, cache: KVCache, at: int, tokens: Sequence[int]) -> Tensor:
    """Run these tokens at positions `at`, `at` + 1, ..., append their KV -> logits [n, V] after each.

    The cache must have room for them.
    """
    return append_each(model, [Row(cache, at + i, token) for i, token in enumerate(tokens)])


def append_each(model: DecoderModel, rows: Sequence[Row]) -> Tensor:
    """Run each row's token at its position, append its KV -> logits [B, V], to rounding whatever the other rows are."""
    decoder = native_decoder(model)[0] if 0 < len(rows) <= MAX_ROWS else None
    return decoder(rows) if decoder else run_rows(model, rows)


def decode_each(model: DecoderModel, rows: Sequence[Row]) -> Tensor:
    """`append_each` as answers are decoded: exactly, or approximately."""
    decoder = native_decoder(model, in_int8=True)[0] if model.decodes_in_int8 else None
    if decoder is None:
        return append_each(model, rows)
    return torch.cat([decoder(rows[i : i + MAX_ROWS]) for i in range(0, len(rows), MAX_ROWS)])


def decode_in_int8(model: DecoderModel) -> None:
    """Have answers decoded approximately. Raises ConfigError where the model has no such native step."""
    decoder, reason = native_decoder(model, in_int8=True)
    if decoder is None:
        raise ConfigError(
            f"model.decode=int8 cannot be used with this model: {reason}; leave it at exact",
            setting="model.decode",
        )
    model.decodes_in_int8 = True


class DecodeRunner:
    """Decoding steps over B caches. For one thread."""

    @torch.inference_mode()
    def __init__(
        self,
        model: DecoderModel,
        keys: Layers,
        values: Layers,
        n_used: int = 0,
        new_tokens: int = MIN_NEW_TOKENS,
        capture: Capture | None = None,
        caches: Sequence[KVCache] = (),
    ) -> None:
        """keys, values [B, L, K, T, D], of which `n_used` tokens are filled; or L of [B, K, T, D], if layers differ.

        new_tokens: of an answer, at most. capture: by default a CUDA graph, where that pays. caches: over these keys and
        values, if others run rows in them, too.
        """
        # What a mixture of experts launches depends on the row; a state is another tensor after each step.
        self._caches = caches or slots(keys, values)
        is_fixed = not (model.has_experts or model.recurrent)
        can = model.device.type == "cuda" and is_fixed and len(self._caches) <= MAX_CACHES
        pays = can and new_tokens >= MIN_NEW_TOKENS
        self._model = model
        self._keys = keys
        self._values = values
        self._capture = capture or (CudaGraph if pays else None)
        self._graph: Replayed | None = None
        self._n_steps = 0
        if self._capture:
            self._rows = torch.zeros(3, len(self._caches), dtype=torch.long, device=model.device)
            for cache in self._caches:
                cache.fill(0.0, n_used)  # a weight of 0 does not hide a NaN

    @classmethod
    def over(cls, model: DecoderModel, cache: KVCache, n_used: int, new_tokens: int) -> DecodeRunner:
        """Make a runner of one cache, for `step`."""
        keys, values = (map_layers(lambda x: x[None], side) for side in (cache.keys, cache.values))
        return cls(model, keys, values, n_used, new_tokens, caches=[cache])

    def draft_room(self, n_requests: int) -> int:
        """How many draft tokens of each of `n_requests` fit one step; 0 where a row more costs too much.

        In a native step all rows share the reading of the weights, and no row's logits depend on the others.
        """
        if self._capture or native_decoder(self._model, self._model.decodes_in_int8)[0] is None:
            return 0
        return max(0, MAX_ROWS // n_requests - 1)

    def step(self, at: int, tokens: list[int]) -> Tensor:
        """Run tokens of the only cache from position `at` on, append their KV -> logits [n, V] after each.

        Valid until the next step.
        """
        return self.decode([(0, at, tokens)])[0]

    @torch.inference_mode()
    def decode(self, steps: Sequence[tuple[int, int, list[int]]]) -> list[Tensor]:
        """Run tokens of several caches, (cache, first position, tokens) each -> logits [n, V] of each.

        Valid until the next step. With a capture, one token each.
        """
        self._n_steps += 1
        if self._capture and self._n_steps > EAGER_STEPS and self._model.can_capture:
            # token, position and place
            rows_of_all = [(0, 0, self._caches[0].capacity - 1)] * len(self._caches)
            for b, at, (token,) in steps:
                rows_of_all[b] = token, at, at
            self._rows.copy_(torch.tensor(rows_of_all).T)
            self._graph = self._graph or self._captured(self._capture)
            if self._graph:
                return [row[None] for row in self._graph()[[b for b, _, _ in steps]]]
        rows = [
            Row(self._caches[b], at + i, token) for b, at, tokens in steps for i, token in enumerate(tokens)
        ]
        logits = decode_each(self._model, rows)
        ends = accumulate(len(tokens) for _, _, tokens in steps)
        return [logits[end - len(tokens) : end] for end, (_, _, tokens) in zip(ends, steps, strict=True)]

    def _captured(self, capture: Capture) -> Replayed | None:
        try:
            return capture(self._step, self._model.device)
        except RuntimeError as error:  # CUDA's errors are such
            self._model.can_capture = False
            log.warning("decoding continues without a CUDA graph: %s", str(error).splitlines()[0])
            return None

    def _step(self) -> Tensor:
        return run_captured(self._model, self._keys, self._values, *self._rows)
