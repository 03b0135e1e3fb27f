"""vLLM's KV connector: both halves of its interface, and what is declined.

    scheduler   on_new_request -> get_num_new_matched_tokens -> update_state_after_alloc -> build_connector_meta   plan.py
    worker      register_kv_caches; start_load_kv after each step's forward -> get_transfer_results   jobs.py, blending.py

All loads are asynchronous: only its own request waits for a job, and a failed one is prefilled by vLLM. Where the
model or its set-up is not supported, the reason is logged, and vLLM serves as if there were no connector.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.forward_context import set_forward_context
from vllm.v1.request import Request

from blendserve.errors import BlendserveError, ModelUnsupported
from blendserve_vllm.metrics import BlendMetrics, BlendStats
from blendserve_vllm.options import ConnectorOptions
from blendserve_vllm.plan import JobPlanner, PrefillJob, Report

if TYPE_CHECKING:
    from blendserve_vllm.jobs import JobQueue

VERSIONS = (0, 32), (0, 33)  # from, and below: those that tests/vllm runs on
log = logging.getLogger(__name__)


@dataclass
class BlendMetadata(KVConnectorMetadata):
    """Jobs of a step, for every worker."""

    jobs: list[PrefillJob] = field(default_factory=list)
    is_alone: bool = False  # vLLM itself computes nothing in this step


@dataclass
class BlendReports(KVConnectorWorkerMetadata):
    """What a worker tells the scheduler after a step."""

    reports: dict[str, Report] = field(default_factory=dict)
    declined: str = ""  # why this worker runs no jobs

    def aggregate(self, other: KVConnectorWorkerMetadata) -> BlendReports:
        assert isinstance(other, BlendReports)
        errors = {name: report for name, report in other.reports.items() if report.error}
        return BlendReports({**other.reports, **self.reports, **errors}, self.declined or other.declined)


class BlendConnector(KVConnectorBase_V1):
    """Fills the KV cache of prompts with stored chunks in them."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for wrong settings, StoreError for a store that cannot be opened."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.planner: JobPlanner | None = None
        self.queue: JobQueue | None = None
        self._reports: dict[str, Report] = {}
        self.declined = declined(vllm_config, kv_cache_config)
        self._told = False  # whether the scheduler knows why
        self._options = ConnectorOptions.of(self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER and not self.declined:
            block = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
            self.planner = self._options.planner(vllm_config.model_config, block)
        self._log_declined()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ------------------------------------------------------------------ scheduler

    def on_new_request(self, request: Request) -> None:
        if self.planner is None or any(why for why in _unusual(request)):
            return
        try:
            self.planner.add(request)
        except Exception:
            log.warning("request %s is served as plain vLLM", request.request_id, exc_info=True)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        n = self.planner.claim(request.request_id, num_computed_tokens) if self.planner else 0
        return n, n > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if self.planner and num_external_tokens > 0:
            self.planner.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        is_alone = scheduler_output.total_num_scheduled_tokens == 0
        return BlendMetadata(self.planner.take_jobs() if self.planner else [], is_alone)

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if self.planner and isinstance(told, BlendReports):
            self.planner.done(told.reports)
            if told.declined:
                self.planner, self.declined = None, told.declined
                self._log_declined()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.planner.finish(request.request_id) if self.planner else None

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self.declined:
            return
        try:
            self.queue = self._options.job_queue(self._vllm_config, self._kv_cache_config, _calling_model())
        except (BlendserveError, ImportError, AttributeError) as error:
            self.declined = str(error)
            self._log_declined()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, BlendMetadata)
        if self.queue is None:
            self._reports |= {job.request_id: Report(error=self.declined) for job in metadata.jobs}
        else:
            self.queue.add(metadata.jobs)
            self.queue.step(metadata.is_alone)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.queue:
            self.queue.cancel(finished_req_ids)
            self._reports |= self.queue.take_reports()
        failed = {name for name, report in self._reports.items() if report.error}
        return KVConnectorTransferResults(finished_recving=set(self._reports), failed_recving=failed)

    def get_kv_connector_stats(self) -> BlendStats | None:
        return BlendStats.of(self._reports) if self._reports and self._is_first_rank else None

    def build_connector_worker_meta(self) -> BlendReports | None:
        reports, self._reports = self._reports, {}
        declined, self._told = "" if self._told else self.declined, True
        return BlendReports(reports, declined) if reports or declined else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved layer by layer: `store` requests are jobs."""

    def wait_for_save(self) -> None:
        """See save_kv_layer."""

    @property
    def _is_first_rank(self) -> bool:
        return self._vllm_config.parallel_config.rank == 0

    def _log_declined(self) -> None:
        if self.declined:
            log.warning("blendserve serves as plain vLLM: %s", self.declined)

    # ------------------------------------------------------------------ metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        return BlendStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *about: Any, **named: Any) -> BlendMetrics:
        return BlendMetrics(*about, *named.values())


def declined(config: VllmConfig, kv_cache_config: Any) -> str:
    """Why nothing is blended with this set-up of vLLM; "" if something may be."""
    parallel, model, spec = config.parallel_config, config.model_config, config.speculative_config
    transfer, cache = config.kv_transfer_config, config.cache_config
    low, high = (".".join(map(str, v)) for v in VERSIONS)
    reasons = {
        f"vLLM {vllm.__version__} is not known: install one from {low} on, below {high}": not _is_known_version(),
        "set kv_load_failure_policy to recompute: a failed job would fail its request": (
            transfer is None or transfer.kv_load_failure_policy != "recompute"
        ),
        "pipeline parallelism is not supported": parallel.pipeline_parallel_size > 1,
        "context parallelism is not supported": (
            max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1
        ),
        "experts with data parallelism are not supported": parallel.data_parallel_size > 1
        and parallel.is_moe_model,
        "latent attention (MLA) is not supported": model.use_mla,
        "models with a state (Mamba, linear attention) are not supported": model.has_inner_state
        or model.is_hybrid,
        "multimodal positions (M-RoPE) are not supported": model.uses_mrope,
        "adapters (LoRA) are not supported: a job's rows would run with those of vLLM's last step": (
            config.lora_config is not None
        ),
        "draft models are not supported": spec is not None and spec.method != "ngram",
        "layers that share KV for fast prefill are not supported": cache.kv_sharing_fast_prefill,
        "layers keep KV in several groups of blocks": len(kv_cache_config.kv_cache_groups) != 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_known_version() -> bool:
    """Whether this vLLM is of a release that was tested, and has what is used of it."""
    parts = vllm.__version__.split(".")[:2]
    release = tuple(int(part) for part in parts if part.isdigit())
    has_all = hasattr(KVConnectorBase_V1, "on_new_request") and hasattr(Request, "update_block_hashes")
    options = inspect.signature(set_forward_context).parameters
    return VERSIONS[0] <= release < VERSIONS[1] and has_all and "skip_compiled" in options


def _unusual(request: Request) -> tuple[object, ...]:
    """What a request may have that is not blended."""
    special = request.mm_features, request.prompt_embeds is not None, request.pooling_params
    return *special, request.resumable, request.skip_reading_prefix_cache, request.prompt_token_ids is None


def _calling_model() -> Any:
    """The model of the runner that registers its caches. Raises ModelUnsupported."""
    frame = sys._getframe(1)
    while frame is not None:
        runner: Any = frame.f_locals.get("self")
        if hasattr(runner, "model") and hasattr(runner, "kv_cache_config"):
            return runner.model
        frame = frame.f_back  # type: ignore[assignment]
    raise ModelUnsupported("vLLM's runner, which has the model, was not found")
