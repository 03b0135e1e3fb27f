"""The connector's settings, and what is made of them in each process.

kv_connector_extra_config   store        place of the chunks, as `store.location`
                            config       settings file of blendserve, for all else
                            precomputed  chunks are those of `blendserve precompute`, not of this package
                            slice_tokens of a prefill, which a job may take of a step that computes other requests
                            SECTION.NAME any other setting, such as blend.ratio
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from blendserve.blend.chunk_kv import ChunkKeys
from blendserve.config import Config, ModelConfig
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import ConfigError
from blendserve.models.loader import VOLATILE, load_model, load_tokenizer
from blendserve_vllm.plan import JobPlanner
from blendserve_vllm.records import Ranks, Records, storage

if TYPE_CHECKING:
    from blendserve_vllm.jobs import JobQueue

OWN = {"store": "", "config": None, "precomputed": False, "slice_tokens": 16}
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of each file of weights
WEIGHTS = "*.safetensors", "*.bin", "*.pt", "*.gguf"


@dataclass(frozen=True)
class ConnectorOptions:
    """See above."""

    config: Config
    precomputed: bool
    slice_tokens: int

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorOptions:
        """Raises ConfigError."""
        own = {**OWN, **{name: value for name, value in extra.items() if name in OWN}}
        others = {name: value for name, value in extra.items() if name not in OWN}
        if unknown := [name for name in others if "." not in name]:
            raise ConfigError(
                f"kv_connector_extra_config has no {unknown[0]!r}: give {', '.join(OWN)}, or SECTION.NAME",
                setting=unknown[0],
            )
        lines = [f"{name}={json.dumps(value)}" for name, value in others.items()]
        if own["store"]:
            lines.append(f"store.location={own['store']}")
        config = Config.load(own["config"], lines)
        if not config.store.location:
            raise ConfigError(
                "kv_connector_extra_config has no store: give the folder of the chunks", setting="store"
            )
        if not isinstance(own["slice_tokens"], int) or own["slice_tokens"] < 0:
            raise ConfigError(
                f"slice_tokens cannot be {own['slice_tokens']!r}: give a number of tokens, 0 for whole jobs",
                setting="slice_tokens",
            )
        return cls(config, bool(own["precomputed"]), own["slice_tokens"])

    def planner(self, model: Any, hash_block: int) -> JobPlanner:
        """Make the planner of the scheduler's process. model: vLLM's ModelConfig. Raises ModelError, StoreError."""
        prompts = PromptBuilder(load_tokenizer(ModelConfig(name=model.tokenizer)), self.config.prompt)
        fingerprint = self._fingerprint(model)
        store, _ = storage(self.config, torch.device("cpu"))
        keys = ChunkKeys(fingerprint, str(model.dtype), prompts.kv_context, self.config.store.namespace)
        return JobPlanner(store, keys, prompts.prefix, self.config.blend, hash_block)

    def job_queue(self, vllm_config: Any, kv_cache_config: Any, model: Any) -> JobQueue:
        """Make the job queue of a worker. model: vLLM's. Raises ModelUnsupported, StoreError, ConfigError."""
        # Not at the top: an unknown vLLM may lack what these import.
        from blendserve_vllm.blending import JobRunner
        from blendserve_vllm.jobs import JobQueue, pause
        from blendserve_vllm.passes import Passes

        passes = Passes(vllm_config, kv_cache_config, model, pause)
        passes.slice_row_layers = self.slice_tokens * passes.model.n_kv_layers
        ranks = Ranks(vllm_config.model_config.get_total_num_kv_heads())
        # Alone, a step may do as much for jobs as vLLM's own steps do for prefills.
        slices_alone = max(1, passes.max_rows // self.slice_tokens) if self.slice_tokens else 1
        records = Records(self.config, passes.model.device, ranks)
        tokenizer = load_tokenizer(ModelConfig(name=vllm_config.model_config.tokenizer))
        runner = JobRunner(passes, records, ranks, tokenizer)
        return JobQueue(runner, slices_alone)

    def _fingerprint(self, model: Any) -> str:
        """What stands for the model in the keys of chunks. Its own KV may differ from ours, by kernels and weights."""
        if self.precomputed:
            dtype = str(model.dtype).removeprefix("torch.")
            return load_model(ModelConfig(name=model.model, dtype=dtype, device="cpu")).fingerprint
        settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in VOLATILE}
        about = model.quantization, model.revision, None if Path(model.model).is_dir() else model.model
        digest = xxhash.xxh3_128(json.dumps(["vllm", settings, about], sort_keys=True, default=str).encode())
        for file in sorted(f for kind in WEIGHTS for f in Path(model.model).glob(kind)):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as weights:
                for at in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                    weights.seek(at)
                    digest.update(weights.read(SAMPLE_BYTES))
        return digest.hexdigest()
