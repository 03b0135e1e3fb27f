"""Blending prefill: stored KV where it may stay, fresh rows where it must not, first-token logits at the end.

    active rows = suffix + tokens without stored KV + tokens that the policy chose

Only active rows run through the layers. At each layer the stored KV is placed, corrected, and overwritten at the active
rows with what they just computed; the rows then attend by position to all of it. With nothing stored this is ordinary
prefill; with everything chosen it equals it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from blendserve.blend.corrections import Correction
from blendserve.blend.layout import Layout, State
from blendserve.blend.loader import KVLoader
from blendserve.blend.policies import Policy, make_policy, n_scoring_rows, validate_blend
from blendserve.config import BlendConfig
from blendserve.core import Steps
from blendserve.errors import ConfigError
from blendserve.kernels.ops import attend, attend_with_scores
from blendserve.kernels.rows import Rows, plan_layers
from blendserve.kernels.types import Prior, Rope
from blendserve.models.forward import LayerPass, run_layers
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel, Hidden, Projected
from blendserve.registry import CORRECTIONS
from blendserve.timing import Clock


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What a prefill starts from and how it is run."""

    layout: Layout
    blend: BlendConfig  # with the method that was chosen
    policy: Policy  # with the ratio that was chosen, prepared for the prompt
    reason: str = ""  # why the method is not "blend", if that was chosen
    full_prefill_s: float | None = None  # estimate; None: not estimated

    @classmethod
    def of(cls, layout: Layout, blend: BlendConfig, reason: str = "") -> PrefillPlan:
        """The plan of these settings for a policy that does not read the prompt."""
        return cls(layout, blend, make_policy(blend), reason)


@dataclass(frozen=True, slots=True)
class PassResult:
    """What decode starts from, and what the report is made of."""

    cache: KVCache
    logits: Tensor  # [V], for the token after the prompt
    # Positions that the policy selected and that ran through the last layer.
    recomputed: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.long))
    bytes_loaded: int = 0
    read_s: float = 0.0  # by the reader thread, with its waits for another machine
    cost: float = 1.0  # row-layers / (T * L)
    scores: Tensor | None = None  # [T] on the host, by which the policy selected; NaN where it gave none
    corrected: bool = False  # whether reused KV was changed
    is_sound: bool = True  # the last row is finite, and so small that its norm is


@torch.inference_mode()
def blend_prefill(
    model: DecoderModel,
    plan: PrefillPlan,
    cache: KVCache | None = None,
    clock: Clock | None = None,
    prior: Callable[[int], Prior] | None = None,
) -> Steps[PassResult]:
    """Run a prompt from what its layout has.

    cache: with room for the prompt; a new one without more if None. prior: of a layer, for corrections that use one.
    Raises CorruptRecord if a stored layer fails its checksum, ChunkLost if it does not arrive: lay out again without that
    chunk; ConfigError for settings of the policy that do not fit the model.
    """
    layout = plan.layout
    policy = plan.policy
    n = layout.n_tokens
    device = model.device
    validate_blend(plan.blend, model)
    cache = cache or KVCache(model, n)
    clock = clock or Clock(device)
    cache.forget_states()
    ids = torch.tensor(layout.prompt.ids, dtype=torch.long, device=device)
    ropes = model.rope(torch.arange(n, device=device))
    spans = layout.spans(State.REUSED)
    with closing(KVLoader(model, cache, layout.loaded, ropes, clock)) as loader:
        load_s = clock.seconds["load"]
        scores = None
        with clock.stage("select"):
            if policy.is_scored(layout):
                scores = yield from suffix_scores(model, ids, layout, loader)
            active = layout.fresh.clone()
            active[policy.select(layout, scores)] = True
        clock.seconds["select"] -= clock.seconds["load"] - load_s  # the scoring pass places KV, too
        about = {"rotary": model.rotary, "ropes": ropes, "spans": spans, "prior": prior}
        correction = CORRECTIONS.make(plan.blend.correction, **about) if spans else None
        layers = _BlendPass(model, layout, loader, policy, correction, active.nonzero()[:, 0], scores, clock)
        hidden = yield from run_layers(model, model.embed(ids[layers.rows.device]), layers)
        result = layers.result(model.logits(hidden[-1:])[0])
        last = hidden.x[-1] if isinstance(hidden, Hidden) else hidden[-1]
        return replace(result, is_sound=bool(last.float().square().sum().isfinite()))


class _BlendPass(LayerPass):
    """The active rows of one request, through the layers."""

    def __init__(
        self,
        model: DecoderModel,
        layout: Layout,
        loader: KVLoader,
        policy: Policy,
        correction: Correction | None,
        active: Tensor,
        scores: Tensor | None,
        clock: Clock,
    ) -> None:
        """active: positions [S], ascending. scores [T]: of the scoring pass, if there was one."""
        self._layout = layout
        self._loader = loader
        self._policy = policy
        self._correction = correction
        self._model = model
        self._cache = loader.cache
        self._scores = scores
        self._clock = clock
        self._is_corrected = False  # in any layer
        self._row_layers = 0 if scores is None else n_scoring_rows(layout) * self._model.n_layers
        self.rows = Rows.on(self._model.device, active)  # up to the last layer that keeps KV
        self._stretches = list(_stretches(layout, active, self._model.seam)) if self._model.recurrent else []
        self._run(self.rows)

    def rope(self, l: int) -> Rope:
        return self._loader.ropes[l].at(self._running.device)

    def write(self, l: int, fresh: Projected, keys: Tensor) -> Tensor | slice | None:
        rows = self.rows
        cache = self._cache
        self._row_layers += len(rows)
        self._loader.place(l)
        with self._clock.stage("select"):
            kept = self._filter(l, keys, fresh.v) if l in self._policy.check_layers else None
        if kept is None and self._correction:  # rows that are about to be dropped are no sample to learn from
            with self._clock.stage("correct"):
                stored = cache.keys[l], cache.values[l]
                self._is_corrected |= self._correction.apply(l, stored, rows, (keys, fresh.v))
        cache.write(l, rows.device, keys, fresh.v)
        left: Tensor | None = None
        if kept is not None:
            left = kept.to(rows.device.device)
            self.rows = Rows(rows.host[kept], rows.device[left])
        if l == self._model.n_kv_layers - 1:
            # No KV is left to make: only the last row goes on, which is never dropped.
            self._row_layers += self._model.n_layers - self._model.n_kv_layers
            self._run(self.rows.last)
            return slice(-1, None)
        if left is not None:
            self._run(self.rows)
        return left

    def attend(self, l: int, q: Tensor) -> Tensor:
        n = self._layout.n_tokens
        cache = self._cache
        keys, values = cache.keys[l][:, :n], cache.values[l][:, :n]
        return attend(q, *self._model.attended_kv(l, keys, values), self._model.specs[l], self._plans[l])

    def recur(self, l: int, x: Tensor) -> Tensor:
        self._row_layers += len(self.rows)
        mixer = self._model.mixer(l)
        maps = self._loader.state_maps(l)
        parts = list[Tensor]()
        state = mixer.empty
        done = 0
        for start, stop, is_mapped in self._stretches:
            if is_mapped:
                state = mixer.after(state, *maps[start])
            else:
                added, state = mixer.run(x[done : done + stop - start], state)
                parts.append(added)
                done += stop - start
        self._cache.keep_state(l, self._layout.n_tokens, state)
        return torch.cat(parts)

    def result(self, logits: Tensor) -> PassResult:
        """logits [V]: after the last layer."""
        rows = self.rows.host
        loader = self._loader
        recomputed = rows[self._layout.reusable[rows]]
        cost = self._row_layers / (self._layout.n_tokens * self._model.n_layers)
        read = loader.bytes_loaded, loader.read_s
        return PassResult(self._cache, logits, recomputed, *read, cost, self._scores, self._is_corrected)

    def _run(self, rows: Rows) -> None:
        """These rows go on."""
        self._running = rows
        self._plans = plan_layers(rows, self._model.attention_forms)

    def _filter(self, l: int, keys: Tensor, values: Tensor) -> Tensor | None:
        """Indices of the rows that go on past layer l's projection; None: all. Waits for a GPU's choice."""
        cache = self._cache
        rows = self.rows
        is_candidate = self._layout.reusable[rows.host]
        which = is_candidate.nonzero()[:, 0]
        if not len(which):
            return None
        index = which.to(values.device)
        at = rows.device[index]
        stored = cache.keys[l][:, at], cache.values[l][:, at]
        scores = self._policy.score((keys[:, index], values[:, index]), stored)
        if self._scores is None:
            self._scores = torch.full((self._layout.n_tokens,), torch.nan)
        self._scores[rows.host[which]] = scores.cpu()
        kept = self._policy.kept(l, self._layout).best(rows.host[which], scores)
        return torch.cat([(~is_candidate).nonzero()[:, 0], which[kept]]).sort().values


def _stretches(layout: Layout, active: Tensor, seam: int) -> Iterator[tuple[int, int, bool]]:
    """A prompt as stretches: start, stop, and whether its state map is used; the others' tokens all run.

    Raises ConfigError where a policy chose some of a stretch, ValueError for a state map that does not begin after its
    chunk's seam.
    """
    runs = torch.zeros(layout.n_tokens, dtype=torch.bool)
    runs[active] = True
    for segment in layout.segments:
        start, stop = segment.span.start, segment.span.stop
        n_running = int(runs[start:stop].sum())
        offset = 0 if segment.chunk is None else seam
        if n_running not in (0, stop - start):
            raise ConfigError(
                "setting 'blend.policy' names a policy that recomputes some tokens of a chunk: with recurrent layers "
                "chunks are reused whole but for their first tokens; set it to none, or to all for exact answers",
                setting="blend.policy",
            )
        is_mapped = n_running == 0
        if is_mapped and segment.offset != offset:
            raise ValueError("a state map is used whole, from its chunk's seam on")
        yield start, stop, is_mapped


def suffix_scores(model: DecoderModel, ids: Tensor, layout: Layout, loader: KVLoader) -> Steps[Tensor]:
    """The scoring pass: the suffix runs alone over the stored KV, and scores each token by what the suffix takes from it.

        score = attention x norm of the token's value, mean over heads, norm over suffix rows, summed over layers

    InfoFlow KV (arXiv 2603.05353, section 4) with true positions. It takes attention alone, over late layers; values
    tell how much of it arrives (as in arXiv 2406.12335), and all layers were better than late ones
    (research/decisions.md). Every layer's stored KV is placed on the way, so the blending pass finds it in the cache.

    ids [T]: of the prompt -> a score for each reusable position [T] on the host, NaN for all others.
    """
    layers = SuffixPass(layout, loader)
    yield from run_layers(model, model.embed(ids[layers.rows]), layers)
    return layers.reusable_scores


class SuffixPass(LayerPass):
    """Suffix rows over the stored KV. Tokens without KV (missing chunks, the end of a chunk) are hidden.

    `scores` [T] are those of all layers that have run. Any engine may run the rows.
    """

    def __init__(self, layout: Layout, loader: KVLoader) -> None:
        self._loader = loader
        self._cache = loader.cache
        model = loader.model
        self._specs = model.specs
        self._n = layout.n_tokens
        n = layout.n_tokens
        start = layout.n_tokens - n_scoring_rows(layout)
        self.rows = slice(start, n)
        at = torch.arange(start, n)
        absent = layout.fresh & (torch.arange(n) < start)
        self._absent = absent.nonzero()[:, 0].to(model.device)
        self._plans = plan_layers(Rows.on(model.device, at), model.attention_forms, absent)
        self.scores = torch.zeros(n, device=model.device)
        self._is_reusable = layout.reusable

    @property
    def reusable_scores(self) -> Tensor:
        """[T] on the host, NaN for positions that are not reusable."""
        return self.scores.cpu().masked_fill(~self._is_reusable, torch.nan)

    def rope(self, l: int) -> Rope:
        return self._loader.ropes[l].at(self.rows)

    def write(self, l: int, fresh: Projected, keys: Tensor) -> None:
        self._loader.place(l)
        # Memory may hold NaN where nothing is stored, and a weight of 0 does not hide that.
        self._cache.values[l][:, self._absent] = 0
        self._cache.write(l, self.rows, keys, fresh.v)

    def attend(self, l: int, q: Tensor) -> Tensor | None:
        spec = self._specs[l]
        keys = self._cache.keys[l]
        values = self._cache.values[l]
        kv = self._loader.model.attended_kv(l, keys[:, : self._n], values[:, : self._n])
        attended, scores = attend_with_scores(q, *kv, spec, self._plans[l])
        self.scores += scores
        return attended if l + 1 < len(self._specs) else None
