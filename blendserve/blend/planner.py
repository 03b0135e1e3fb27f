"""The cost gate: which method and ratio a request is prefilled with, and what having a chunk saves it.

`method="auto"`: the cheapest of full prefill, prefix caching and blending; CacheBlend chooses a ratio alone (arXiv
2405.16444, section 5), but a short or mostly missing prompt is faster to prefill than to blend.

`ratio="auto"`: recompute for free what can be recomputed while KV is still loading, as that paper's controller does. With
the store and the machine as they were measured, the ratio is raised until recomputing takes nearly as long as loading. It
never falls below the floor set for quality, and stays there for a policy with a scoring pass: that needs every layer
before anything can be selected, so it is all that loading can hide behind, and rows recomputed afterwards are not free.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import replace

from blendserve.blend.cost import CostModel, calibrated, chunk_work, count_rows, count_work
from blendserve.blend.layout import Layout, lay_out, suppose
from blendserve.blend.policies import Policy, make_policy, takes
from blendserve.blend.prefill import PrefillPlan
from blendserve.config import BlendConfig, Method
from blendserve.core import Prompt, TokenIds
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.link import TokenRate
from blendserve.models.model import DecoderModel
from blendserve.store import ChunkKey

MIN_SPEEDUP = 0.95  # an exact method wins unless blending is at least 5% faster
OVERLAP_TARGET = 0.8  # share of loading to fill; layer 0 overlaps with nothing, and estimates err by a fifth
METHODS: tuple[Method, ...] = ("full", "prefix", "blend")


def plan_full_prefill(prompt: Prompt, blend: BlendConfig, reason: str = "") -> PrefillPlan:
    """Nothing is looked up, because of `reason`."""
    return PrefillPlan.of(lay_out(prompt), blend.with_values(method="full"), reason)


class Planner:
    """Plans the prefills of one model. Thread-safe."""

    def __init__(self, model: DecoderModel, fingerprint: str, costs: CostModel | None = None) -> None:
        """costs: of this machine and model; default: measured when they are first needed."""
        self._model = model
        self._fingerprint = fingerprint
        self._costs = costs
        self.load_rate = TokenRate()  # of reading stored KV, without waiting for a link
        self._lock = threading.RLock()

    def calibrate(self) -> CostModel:
        """The cost model: measured once per machine and model, in a few seconds, and kept."""
        with self._lock:
            if self._costs is None:
                self._costs = calibrated(self._model, self._fingerprint)
            return self._costs

    @property
    def is_calibrated(self) -> bool:
        return self._costs is not None

    def plan(self, layout: Layout, blend: BlendConfig, policy: Policy) -> PrefillPlan:
        """Choose the method and the ratio where they are "auto"."""
        reason = ""
        if blend.method == "auto":
            method: Method = "prefix" if layout.n_loaded else "full"
            reason = layout.unused
            if layout.n_found:
                method, reason = choose_method(self._estimates(layout, policy))
            blend = blend.with_values(method=method)
        layout = layout.for_method(blend.method, policy.recomputes)
        if isinstance(blend.ratio, str) and takes(blend.policy, "ratio"):
            ratio = overlapped_ratio(self.calibrate(), layout, policy, self.load_rate.per_token)
            policy = replace(policy, ratio=ratio)
        return PrefillPlan(layout, blend, policy, reason, self._full_prefill_s(layout))

    def _full_prefill_s(self, layout: Layout) -> float | None:
        """Return the seconds that full prefill of this prompt is expected to take; None before `calibrate`."""
        if self._costs is None:
            return None
        return self._costs.seconds(count_rows(layout.for_method("full"), selected=0))

    def _estimates(self, layout: Layout, policy: Policy) -> dict[Method, float]:
        """Seconds that each method is expected to take."""
        costs = self.calibrate()
        n_layers = self._model.n_layers
        layouts = {method: layout.for_method(method, policy.recomputes) for method in METHODS}
        return {m: costs.seconds(count_work(layouts[m], policy, n_layers)) for m in METHODS}

    def token_saves_s(
        self, prompt: Prompt, blend: BlendConfig, chunks: Collection[int], first_is_exact: bool
    ) -> float:
        """Seconds that the stored KV of a token is expected to save if that of all these chunks is used."""

        def least(stored: Collection[int]) -> float:
            return min(self._estimates(suppose(prompt, stored, first_is_exact), policy).values())

        policy = make_policy(blend)
        n_tokens = sum(len(prompt.chunks[i]) for i in chunks)
        return max(0.0, least(()) - least(chunks)) / max(1, n_tokens)

    def requests(
        self, prompt: Prompt, blend: BlendConfig, keys: Mapping[int, ChunkKey], context: TokenIds
    ) -> dict[int, ChunkRequest]:
        """Requests for chunks by number, with the time that each saves, and takes to compute after `context`."""
        token_s = self.token_saves_s(prompt, blend, keys, context == prompt.prefix)
        costs = self.calibrate()
        requests: dict[int, ChunkRequest] = {}
        for i, key in keys.items():
            n = len(prompt.chunks[i])
            requests[i] = ChunkRequest(key, n, token_s * n, costs.seconds(chunk_work(n, len(context))))
        return requests


def choose_method(estimates: Mapping[Method, float]) -> tuple[Method, str]:
    """The method with the least seconds, and why if that is not blending; exact methods are favoured a little."""
    exact = min((m for m in estimates if m != "blend"), key=lambda m: estimates[m])
    if estimates["blend"] < MIN_SPEEDUP * estimates[exact]:
        return "blend", ""
    exact_ms = estimates[exact] * 1e3
    blend_ms = estimates["blend"] * 1e3
    return exact, f"{exact!r} was estimated to take {exact_ms:.0f} ms, blending {blend_ms:.0f} ms"


def overlapped_ratio(
    costs: CostModel, layout: Layout, policy: Policy, seconds_per_token: float | None
) -> float:
    """The largest ratio whose recomputation hides behind loading; the floor while no load has been measured.

    Also the floor for a policy with a scoring pass, see above.
    """
    n_reusable = layout.n_reusable
    floor = policy.ratio
    highest = (n_reusable - 1) / max(1, layout.n_found)  # with all of them there would be nothing to choose
    if seconds_per_token is None or highest <= floor or policy.needs_scoring_pass:
        return floor

    def compute(ratio: float) -> float:  # a rule's dense layers hide no more than their own layers' loading
        selected = replace(policy, ratio=ratio).selection(layout).n
        return costs.seconds(count_rows(layout, selected)._replace(loaded=0.0))

    loading = OVERLAP_TARGET * seconds_per_token * layout.n_loaded
    least = compute(floor)
    most = compute(highest)
    room = (loading - least) / (most - least) if most > least else 0.0  # work grows in proportion to the rows
    return floor + min(1.0, max(0.0, room)) * (highest - floor)
