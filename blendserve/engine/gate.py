"""Whether blending is right on this model: checked once on its real weights before it may blend; the verdict is kept.

A short prompt of real text, in three chunks, is prefilled in every way that has a known result, and compared with the
model's own forward. For a model with sliding windows the chunks are made longer, until the prompt is longer than every
window or MAX_TOKENS is reached.

    rope round trip
                  a key rotated to one place, to another and back is the same key
    layer-0 keys  stored layer-0 keys, as a prefill places them, are the keys that forward has there
    nothing stored, ratio 1.0, one chunk in front
                  KV and logits are forward's: ordinary prefill, everything recomputed, prefix caching
    decoded       the logits after one more token are forward's
    full reuse    with everything stored and nothing recomputed they are *not*: the checks above can fail

Two right computations of one prompt agree to rounding only, and rounding grows through the layers by an amount that
depends on the model. So the model itself gives the unit: its forward runs again with each embedding off by one rounding
step, up or down by chance, and the unit is the distance between the two. Ours may be at most SLACK units away. On the
bundled model in bf16 the unit is .026 (KV) and .06 (logits: a single row, hence noisier), blending is one unit away, and
full reuse 13; in fp32 blending is at 1e-6, and FLOOR holds. Distances of KV are root mean squares relative to the layer's
own, the worst layer counting; of logits, relative to their spread.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from blendserve import __version__
from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.blend.layout import lay_out
from blendserve.blend.policies import defaults_for
from blendserve.blend.prefill import PassResult, PrefillPlan, blend_prefill
from blendserve.config import BlendConfig
from blendserve.core import Chunk, Prompt, TokenIds, run
from blendserve.errors import ModelUnsupported
from blendserve.kernels import autotune, switches
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.reference import Forward, model_forward
from blendserve.models.runner import append
from blendserve.paths import cached_file, read_cached, write_cached
from blendserve.provenance import code_digest
from blendserve.registry import FULL_REUSE
from blendserve.store.view import TensorView

CODE = "kernels", "models", "blend", "engine/gate.py"  # what a verdict is about
SLACK = 3.0
FLOOR = 1e-4
MAX_TOKENS = 2048  # tokens of the prompt
TINY = 1e-30  # keeps 0 / 0 from being NaN

PREFIX = "The following notes were taken on a walk through the old town."
CHUNKS = (
    " The lighthouse at the end of the pier was built in 1871 by Maria Lund, who kept it for thirty years.",
    " Every autumn its keeper paints the door red, because she said that ships should see a friendly house.",
    " Today her granddaughter sells maps there, and tells visitors how the lamp was saved from the great storm.",
)
QUESTION = " Question: who painted the door, and why? Answer:"
NEXT = " The"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GateRow:
    """One check: `value` must be at most `bound`, or at least where `above` is set."""

    check: str
    value: float
    bound: float
    above: bool = False

    @property
    def passed(self) -> bool:
        """NaN passes nothing."""
        return self.value >= self.bound if self.above else self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.check}: {self.value:.3g}, must be {'>=' if self.above else '<='} {self.bound:.3g}"


@dataclass(frozen=True, slots=True)
class GateReport:
    """The verdict on one model."""

    model: str
    rows: tuple[GateRow, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def failure(self) -> str:
        """The failed checks with their numbers, "" when there are none."""
        return "; ".join(str(row) for row in self.rows if not row.passed)

    def require(self) -> None:
        """Raise ModelUnsupported unless every check passed."""
        if not self.passed:
            raise ModelUnsupported(
                f"model {self.model!r} cannot blend, as it fails {self.failure}. "
                "Use method 'full', which its own forward serves, or another model"
            )

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "passed": row.passed} for row in self.rows]
        return {"reader": self.model, "passed": self.passed, "rows": rows}


def check_model(model: LoadedModel) -> GateReport:
    """The kept verdict on this model, machine and these versions, or a new one."""
    versions = __version__, code_digest(*CODE), torch.__version__, version("transformers")
    machine = platform.node(), autotune.machine(), switches.is_native_on(), model.decoder.device
    about = versions, machine, model.fingerprint
    file = cached_file("gate", about)
    try:
        return GateReport(model.name, tuple(GateRow(**row) for row in json.loads(read_cached(file))))
    except (OSError, ValueError, TypeError):
        log.info("Checking that blending is correct with %s (once, a few seconds)", model.name)
    report = check(model)
    write_cached(file, json.dumps([asdict(row) for row in report.rows]))
    return report


def check(model: LoadedModel) -> GateReport:
    """Run every check; takes seconds with a small model."""
    following = model.tokenizer(NEXT, add_special_tokens=False)["input_ids"][0]
    return GateReport(model.name, run_checks(model.decoder, _prompt(model), following))


def _prompt(model: LoadedModel) -> Prompt:
    """The shortest prompt that is longer than every window of the model, within MAX_TOKENS and the model's context."""
    config: Any = model.decoder.config  # its window, too: the windows that are checked may be wrong
    window = max(filter(None, (*model.decoder.windows, getattr(config, "sliding_window", None))), default=0)
    limit = min(MAX_TOKENS, model.decoder.context_limit - 1)

    def ids(text: str, is_start: bool = False) -> TokenIds:
        return tuple(model.tokenizer(text, add_special_tokens=is_start)["input_ids"])

    def of_notes(n_notes: int) -> Prompt:
        """Chunks of their own text, and of n_notes more each."""
        chunks = []
        for i, text in enumerate(CHUNKS):
            notes = (f" Note {n}:{CHUNKS[(i + n) % len(CHUNKS)]}" for n in range(1, n_notes + 1))
            chunks.append(Chunk(ids(text + "".join(notes))))
        return Prompt(ids(PREFIX, is_start=True), tuple(chunks), ids(QUESTION))

    prompt = of_notes(0)
    n_notes = 0
    while len(prompt) <= window and len(longer := of_notes(n_notes + 1)) <= limit:
        prompt = longer
        n_notes = n_notes + 1
    return prompt


def run_checks(model: DecoderModel, prompt: Prompt, following: int) -> tuple[GateRow, ...]:
    """The checks over a prompt of three chunks and the token after it."""
    return tuple(_GateChecks(model, prompt, following).rows())


class _GateChecks:
    """One prompt, the model's own forward of it, and the KV of its chunks computed alone."""

    def __init__(self, model: DecoderModel, prompt: Prompt, following: int) -> None:
        self.model = model
        self.prompt = prompt
        self.following = following
        ids = (*prompt.ids, following)
        self.own = model_forward(model, ids)
        nudged = [model_forward(model, ids, nudge=seed) for seed in (1, 2)]
        self.kv_bound = max(FLOOR, *(SLACK * self._kv_distance(n) for n in nudged))
        logits = [_logits_distance(n.logits[i], self.own.logits[i]) for n in nudged for i in (0, 1)]
        self.logits_bound = max(FLOOR, SLACK * max(logits))
        computer = ChunkComputer(model, prompt.prefix)
        self.stored = computer.compute([chunk.ids for chunk in prompt.chunks])
        self.stored_prefix = computer.context_kv

    def rows(self) -> Iterator[GateRow]:
        eps = torch.finfo(self.model.dtype).eps
        # Four rotations more, each rounding cos, sin, two products and a sum by half a step.
        yield GateRow("rope round trip: a -> b -> a is the identity", self._round_trip(), max(1e-5, 8 * eps))
        # Bit for bit (0) where the matmul sums alike for both shapes; else a step before the rotation and half in it.
        # Attention has not added to them yet, so a key one position off shows here however much rounding grows later.
        reused = self._prefill(3, ratio=0.0, correction=FULL_REUSE["correction"])
        yield GateRow(
            "layer-0 keys: moved to their place they are forward's",
            self._first_keys_distance(reused.cache),
            self.kv_bound if self.model.attention_layer else max(1e-5, 2 * eps),
        )
        whole = self._prefill(0, has_prefix=False, ratio=1.0)
        after = append(self.model, whole.cache, len(self.prompt), (self.following,))[0]
        distance = _logits_distance(after, self.own.logits[1])
        yield GateRow("decoded: logits are forward's", distance, self.logits_bound)
        same = {"nothing stored": whole, "ratio 1.0": self._prefill(3, ratio=1.0)}
        same["one chunk in front"] = self._prefill(1, ratio=0.0)
        for name, done in same.items():
            yield GateRow(f"{name}: KV is forward's", self._kv_distance(done.cache), self.kv_bound)
            distance = _logits_distance(done.logits, self.own.logits[0])
            yield GateRow(f"{name}: logits are forward's", distance, self.logits_bound)
        distance = self._kv_distance(reused.cache)
        yield GateRow("full reuse: KV is not forward's", distance, self.kv_bound, above=True)

    def _prefill(self, n_stored: int, has_prefix: bool = True, **options: Any) -> PassResult:
        """Blend when the first `n_stored` chunks are stored."""
        views = {i: TensorView(kv) for i, kv in enumerate(self.stored[:n_stored])}
        prefix = TensorView(self.stored_prefix) if has_prefix else None
        layout = lay_out(self.prompt, prefix, views).with_seams(self.model.seam)
        cache = KVCache(self.model, len(self.prompt) + 1)
        blend = defaults_for(BlendConfig(method="blend", **options), self.model)
        return run(blend_prefill(self.model, PrefillPlan.of(layout, blend), cache))

    def _round_trip(self) -> float:
        """Stored keys of every layer, at their own place, and after a way to the end of the context and back."""
        model = self.model
        kv = self.stored[0]
        start = len(self.prompt.prefix)
        here = torch.arange(start, start + kv.n_tokens, device=model.device)
        there = here + model.context_limit - start - kv.n_tokens
        distances = []
        n = kv.n_layers
        for l, keys, a, b in zip(range(n), kv.keys, model.rope(here)[:n], model.rope(there)[:n], strict=True):
            if l in model.recurrent:
                continue
            before = model.rotate(keys, a)
            moved = model.rotate(model.rotate(before, a.inverse), b)
            distances.append(_keys_distance(model.rotate(model.rotate(moved, b.inverse), a), before))
        return _worst(distances)

    def _first_keys_distance(self, cache: KVCache) -> float:
        """Keys of the chunks in the first attention layer as placed; above recurrent layers, of one chunk."""
        l = self.model.attention_layer
        distances = list[float]()
        for span in self.prompt.spans[: 1 if l else None]:
            ours, own = (keys[:, span.start : span.stop] for keys in (cache.keys[l], self.own.keys[l]))
            distances.append(_keys_distance(ours, own))
        return _worst(distances)

    def _kv_distance(self, kv: KVCache | Forward) -> float:
        """The distance of the worst layer, over all positions of the prompt.

        Not the worst position: in a mixture of experts, rounding alone may send a token to another expert.
        """
        n = len(self.prompt)
        distances = []
        for ours, own in ((kv.keys, self.own.keys), (kv.values, self.own.values)):
            for mine, theirs in zip(ours[: self.model.n_kv_layers], own, strict=True):
                if not len(theirs):
                    continue  # of a recurrent layer
                a = mine[:, :n].float()
                b = theirs[:, :n].float()
                distances.append(float((a - b).norm() / b.norm().clamp_min(TINY)))
        return _worst(distances)


def _worst(distances: Sequence[float]) -> float:
    """The largest; NaN is worse than anything."""
    return float(torch.tensor(distances).max())


def _keys_distance(keys: Tensor, expected: Tensor) -> float:
    """Keys [K, S, D]: the largest change of one head's vector, relative to its length."""
    change = (keys.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp_min(TINY)
    return float(change.max())


def _logits_distance(logits: Tensor, expected: Tensor) -> float:
    """Logits [V]: root mean square of the difference, relative to their spread."""
    difference = (logits.float() - expected.float()).square().mean().sqrt()
    return float(difference / expected.float().std())
