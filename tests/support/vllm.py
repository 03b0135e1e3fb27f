"""vLLM with the connector over a tiny model on the CPU, beside blendserve's own engine over the same store.

One engine in this process: its scheduler and its worker can be looked at. Every model has heads that the CPU backend has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from blendserve.blend.blender import Blender, Prefilled
from blendserve.config import BlendConfig, Config, ModelConfig
from blendserve.core import Prompt, TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.fetch import open_storage
from blendserve.models.loader import LoadedModel, load_model
from blendserve.models.sources import bundled_folder

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

VOCAB, LENGTH, BLOCK = 49152, 2048, 32  # tokens of the bundled tokenizer, of a context, of a block
# fmt: off
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 32, "max_position_embeddings": LENGTH, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True,
}
SLIDES = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "qwen3": {},  # norms of queries and keys
    "gemma3_text": {**SLIDES, "query_pre_attn_scalar": 8, "tie_word_embeddings": True, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
    }},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []},
}
# fmt: on


def make_model(kind: str, folder: Path) -> Path:
    """A random model with the bundled tokenizer, as a folder."""
    config = AutoConfig.for_model(kind, **{**BASE, **KINDS[kind]})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((bundled_folder() / name).read_bytes())
    return folder


class Own:
    """blendserve's own engine over a store: what vLLM is compared with."""

    def __init__(self, folder: Path, store: Path, *settings: str) -> None:
        self.config = Config.load(None, [f"store.location={store}", *settings])
        self.model: LoadedModel = load_model(ModelConfig(name=str(folder), dtype="float32", threads=1))
        prompts = PromptBuilder(self.model.tokenizer, self.config.prompt)
        self.store, fetcher = open_storage(self.config.store, None, self.model.decoder.device)
        about = self.model.decoder, self.model.fingerprint, self.store, prompts.prefix, prompts.kv_context
        self.blender = Blender(*about, self.config.store.namespace, fetcher=fetcher)
        self.context = prompts.kv_context

    def store_chunks(self, chunks: Sequence[TokenIds], fit_priors: bool = True) -> None:
        self.blender.writer.precompute(chunks)
        if fit_priors:
            self.blender.priors.learn(chunks)
        self.blender.finder.refresh()

    def prefill(self, ids: TokenIds, blend: BlendConfig) -> Prefilled:
        """A plain prompt, of which nothing is cached."""
        return self.blender.run(Prompt.plain(ids), blend)

    def chosen(self, done: Prefilled) -> set[int]:
        """Positions that the policy chose."""
        return set(done.result.recomputed.tolist())


@dataclass(frozen=True)
class Answer:
    """What vLLM answered."""

    tokens: tuple[int, ...]
    logprobs: Tensor  # [V] of the first token
    report: Mapping[str, Any]  # of the connector
    n_cached: int


@dataclass
class Served:
    """vLLM with the connector."""

    llm: Any
    connector: Any  # the worker's half
    scheduler: Any

    def ask(
        self, *prompts: Sequence[int], params: Any = None, new: int = 4, keep: bool = False
    ) -> list[Answer]:
        """Answers to prompts that are sent at once. params: the `blendserve` of their kv_transfer_params, one or a list.

        keep: what is in the prefix cache.
        """
        from vllm import SamplingParams

        if not keep:
            assert self.llm.reset_prefix_cache()
        each = params if isinstance(params, list) else [params] * len(prompts)
        extra = [{"kv_transfer_params": {"blendserve": word}} if word is not None else {} for word in each]
        made = [
            SamplingParams(
                max_tokens=new, temperature=0, ignore_eos=True, logprobs=-1, extra_args=args, detokenize=False
            )
            for args in extra
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts], made, use_tqdm=False
        )
        return [_answer(output) for output in outputs]

    def one(self, ids: Sequence[int], params: Any = None, **options: Any) -> Answer:
        return self.ask(ids, params=params, **options)[0]

    @property
    def runner(self) -> Any:
        """The worker's job runner."""
        return self.connector.queue.runner

    def poison(self) -> None:
        """Fill all blocks with NaN; call it while no request runs, after the prefix cache was reset."""
        assert self.llm.reset_prefix_cache()
        for layer in self.runner.passes.layers:
            layer.kv_cache.fill_(float("nan"))


def _answer(output: Any) -> Answer:
    first = output.outputs[0].logprobs[0]
    logprobs = torch.full((VOCAB,), -torch.inf)
    for token, value in first.items():
        logprobs[token] = value.logprob
    report = (output.kv_transfer_params or {}).get("blendserve", {})
    return Answer(tuple(output.outputs[0].token_ids), logprobs, report, output.num_cached_tokens or 0)


@contextmanager
def serving(
    folder: Path, store: Path, extra: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Served]:
    """vLLM in this process over the chunks that `Own` stored."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    settings = {"store": str(store), "precomputed": True, **(extra or {})}
    transfer = {
        **{"kv_connector": "BlendConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"},
        "kv_connector_extra_config": settings,
    }
    usual = {
        **{
            "dtype": "float32",
            "max_model_len": LENGTH,
            "enforce_eager": True,
            "max_num_seqs": 16,
            "max_logprobs": -1,
        },
        **{"block_size": BLOCK, "max_num_batched_tokens": LENGTH, "skip_tokenizer_init": True},
    }
    llm = LLM(model=str(folder), kv_transfer_config=KVTransferConfig(**transfer), **{**usual, **options})
    try:
        core = llm.llm_engine.engine_core.engine_core
        yield Served(llm, get_kv_transfer_group(), core.scheduler)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def kl(exact: Tensor, other: Tensor) -> float:
    """Of log probabilities [V], in nats."""
    return float((exact.exp() * (exact - other)).sum())


def words(n: int, seed: int) -> TokenIds:
    """Random tokens, none of them a control token."""
    drawn = torch.randint(100, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())
