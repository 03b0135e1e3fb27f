"""The scheduler's half: token ids of a request -> stored chunks in it -> what is claimed, and the job for the workers.

    | prefix | chunk 0 | text | chunk 1 | ... | suffix | last token |
    | exact  | exact   |  salted: from the first approximate token on  |
    |<---- vLLM's own hit ---->|<----- claimed: a job makes it ------>|

vLLM names a block of its prefix cache by a chain of hashes. From the first block with an approximate token on, the chain
goes on from a salted hash: no exact request hits such a block, and the same prompt blended in the same way does.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from blendserve.blend.chunk_kv import ChunkKeys
from blendserve.blend.priors import MAX_PROMPT_TOKENS
from blendserve.blend.runs import MIN_SPAN, RunFinder
from blendserve.config import BlendConfig
from blendserve.core import PLAIN_SUFFIX, Run, TokenIds
from blendserve.errors import ConfigError, InputError
from blendserve.registry import FULL_REUSE
from blendserve.store import KVStore

NAME = "blendserve"  # in a request's kv_transfer_params, and in the answer's
# Words there: blend nothing; store the chunk at the prompt's end; fit the correction prior on the prompt's chunks.
EXACT, STORE, FIT = "exact", "store", "fit"
MIN_SHARE = 0.25  # of a prompt that stored chunks must cover; less is vLLM's own prefill

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefillJob:
    """What a worker does for one request: fill its blocks from `start` up to the last token, which is left out."""

    request_id: str
    ids: TokenIds  # of the prompt
    start: int  # tokens that vLLM has cached
    blocks: tuple[int, ...]
    keys: ChunkKeys
    prefix: TokenIds  # that priors were fitted behind
    blend: BlendConfig
    runs: tuple[Run, ...] = ()
    first_is_exact: bool = False  # whether a chunk right after the prefix is exact there
    task: str = ""  # in place of blending: STORE, FIT

    @property
    def context_tokens(self) -> int:
        return len(self.keys.context)


@dataclass(frozen=True)
class Report:
    """What a job did, in tokens. Sent back to the scheduler, and to the client as kv_transfer_params."""

    tokens_matched: int = 0  # of stored chunks, that vLLM had not cached
    tokens_recomputed: int = 0  # of these, chosen by the policy
    tokens_approximate: int = 0  # of these, the others that do not stand where they were computed
    tokens_stored: int = 0
    tokens_fitted: int = 0  # of all prompts that the correction prior was fitted on; 0 if these are too few
    rows: int = 0  # through the model in the last pass
    correction: str = ""
    error: str = ""  # why the job failed, and vLLM computed the prompt

    def to_dict(self) -> dict[str, Any]:
        """The counts that are not zero, as a dictionary."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name))}


class VllmRequest(Protocol):
    """What is read of vLLM's request."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None
    block_hashes: list[Any]

    def update_block_hashes(self) -> None:
        """Append the hashes of blocks that have none."""


@dataclass
class _RequestPlan:
    """The plan of one request, from its arrival to its end."""

    ids: TokenIds
    blend: BlendConfig
    runs: tuple[Run, ...] = ()
    task: str = ""
    has_failed: bool = False
    report: Report = Report()

    def n_matched(self, start: int) -> int:
        """Tokens of stored chunks from a position on."""
        return sum(max(0, run.span.stop - max(start, run.span.start)) for run in self.runs)


class JobPlanner:
    """Plans the requests of one engine. For the scheduler's thread."""

    def __init__(
        self, store: KVStore, keys: ChunkKeys, prefix: TokenIds, blend: BlendConfig, hash_block: int
    ):
        """keys: of stored chunks. prefix: that priors were fitted behind. hash_block: tokens of a block hash."""
        self._keys, self._prefix, self._blend, self._hash_block = keys, prefix, blend, hash_block
        self._finder = RunFinder(store, keys)
        self._finder.refresh()  # the index is complete before the first request
        self._plans: dict[str, _RequestPlan] = {}
        self._jobs: list[PrefillJob] = []

    def add(self, request: VllmRequest) -> None:
        """A request arrived: match it, and salt its hashes. Wrong parameters are logged, and nothing is blended."""
        try:
            plan = self._plan(tuple(request.prompt_token_ids or ()), request.kv_transfer_params or {})
        except (ConfigError, InputError) as error:
            log.warning("request %s is served as plain vLLM: %s", request.request_id, error)
            return
        if plan is None:
            return
        self._plans[request.request_id] = plan
        first = next((run.span.start for run in plan.runs if not self._is_exact(run, plan)), None)
        if first is not None and not plan.task:
            self._salt(request, first // self._hash_block, plan.blend)

    def claim(self, request_id: str, start: int) -> int:
        """Tokens that a job will make behind the `start` tokens that vLLM has cached."""
        plan = self._plans.get(request_id)
        if plan is None or plan.has_failed:
            return 0
        n = len(plan.ids) - 1 - start
        return n if n > 0 and (plan.task or plan.n_matched(start) >= MIN_SPAN) else 0

    def allocated(self, request_id: str, blocks: Sequence[int], n: int) -> None:
        """vLLM has allocated these blocks for a request with n claimed tokens."""
        plan = self._plans[request_id]
        start = len(plan.ids) - 1 - n
        is_first = bool(plan.runs) and self._keys.context == plan.ids[: plan.runs[0].span.start]
        about = self._keys, self._prefix, plan.blend, plan.runs, is_first, plan.task
        self._jobs.append(PrefillJob(request_id, plan.ids, start, tuple(blocks), *about))

    def take_jobs(self) -> list[PrefillJob]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def done(self, reports: Mapping[str, Report]) -> None:
        """Workers have ended jobs. A failed one is not claimed again."""
        for request_id, report in reports.items():
            if plan := self._plans.get(request_id):
                plan.report, plan.has_failed = report, bool(report.error)
                if plan.task == STORE and not report.error:
                    self._finder.add(plan.ids[len(self._keys.context) :])

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """A request ended -> what its answer says of it."""
        plan = self._plans.pop(request_id, None)
        return {NAME: plan.report.to_dict()} if plan else None

    def _plan(self, ids: TokenIds, params: Mapping[str, Any]) -> _RequestPlan | None:
        """None: nothing to do. Raises ConfigError, InputError."""
        blend, word = self._blend, params.get(NAME)
        if isinstance(word, Mapping):
            blend = blend.with_values(**word)
        elif word == STORE:
            return self._plan_store(ids)
        elif word == FIT:
            return self._plan_fit(ids)
        elif word not in (None, EXACT):
            raise InputError(
                f"{NAME} cannot be {word!r}: give {EXACT!r}, {STORE!r}, {FIT!r} or settings of blending",
                setting=NAME,
            )
        if word == EXACT or blend.method in ("full", "prefix"):
            return None
        if blend.method == "reuse":
            blend = blend.with_values(**FULL_REUSE)
        runs = self._finder.in_prompt(ids, 0, len(ids) - PLAIN_SUFFIX)
        plan = _RequestPlan(ids, blend.with_values(method="blend"), runs)
        return plan if plan.n_matched(0) >= max(MIN_SPAN, MIN_SHARE * len(ids)) else None

    def _plan_store(self, ids: TokenIds) -> _RequestPlan:
        n = len(self._keys.context)
        if ids[:n] != self._keys.context or len(ids) - n < MIN_SPAN:
            raise InputError(
                f"a chunk to store has at least {MIN_SPAN} tokens after the {n} tokens of this server's context, and "
                "this prompt is not: run `blendserve-warm-vllm` with the settings of the server",
                setting=NAME,
            )
        return _RequestPlan(ids, self._blend, task=STORE)

    def _plan_fit(self, ids: TokenIds) -> _RequestPlan:
        if len(ids) > MAX_PROMPT_TOKENS:
            raise InputError(
                f"a prompt to fit a prior on has at most {MAX_PROMPT_TOKENS:,} tokens, this one {len(ids):,}",
                setting=NAME,
            )
        runs = self._finder.in_prompt(ids, 0, len(ids))
        plan = _RequestPlan(ids, self._blend, runs, task=FIT)
        if all(self._is_exact(run, plan) for run in runs):
            raise InputError("a prompt to fit a prior on needs stored chunks after other text", setting=NAME)
        return plan

    def _is_exact(self, run: Run, plan: _RequestPlan) -> bool:
        return run.offset == 0 and self._keys.context == plan.ids[: run.span.start]

    def _salt(self, request: VllmRequest, first: int, blend: BlendConfig) -> None:
        """Go on from another hash at block `first`; later ones inherit it, as they inherit `cache_salt` from before.

        Prompts that begin with the same chunks share these blocks, whatever their questions: a conversation goes on.
        """
        hashes = request.block_hashes
        if first < len(hashes):
            seed = hashes[first], self._keys.fingerprint, self._keys.namespace, blend.model_dump_json()
            del hashes[first:]
            hashes.append(hashlib.sha256(repr(seed).encode()).digest())
            request.update_block_hashes()


def failed(error: BaseException) -> Report:
    return Report(error=f"{type(error).__name__}: {error}")
