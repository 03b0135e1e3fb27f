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

import tokenizers as tk
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from blendserve.blend.blender import Blender, Prefilled
from blendserve.config import BlendConfig, Config, ModelConfig
from blendserve.core import Prompt, TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.fetch import open_storage
from blendserve.models.loader import LoadedModel, load_model

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

VOCAB, LENGTH, BLOCK = 384, 2048, 32  # tokens of the vocabulary, of a context, of a block
# fmt: off
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "head_dim": 32, "max_position_embeddings": LENGTH, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True,
}
GROUPED = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SLIDES = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": GROUPED,  # biases
    "qwen3": GROUPED,  # norms of queries and keys
    "gemma3_text": {**GROUPED, **SLIDES, "query_pre_attn_scalar": 8, "tie_word_embeddings": True, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
    }},
    "deepseek_v2": {
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 4,
    },
    "qwen3_moe": {
        **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [],
    },
}
# fmt: on


def make_model(kind: str, folder: Path) -> Path:
    """A random model with a tokenizer, as a folder."""
    config = AutoConfig.for_model(kind, **{**BASE, **KINDS[kind]})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, without a chat template."""
    letters = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    made = tk.Tokenizer(tk.models.BPE({word: n for n, word in enumerate([*special, *letters])}, []))
    made.pre_tokenizer, made.decoder = (
        tk.pre_tokenizers.ByteLevel(add_prefix_space=False),
        tk.decoders.ByteLevel(),
    )
    pad, bos, eos = special
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos)


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
        self, *prompts: Sequence[int], params: Any = None, new: int = 1, keep: bool = False, **options: Any
    ) -> list[Answer]:
        """Answers to prompts that are sent at once. params: the `blendserve` of their kv_transfer_params, one or a list.

        keep: what is in the prefix cache. options: of vLLM's generate.
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
            [{"prompt_token_ids": list(ids)} for ids in prompts], made, use_tqdm=False, **options
        )
        return [_answer(output) for output in outputs]

    def one(self, ids: Sequence[int], params: Any = None, **options: Any) -> Answer:
        return self.ask(ids, params=params, **options)[0]

    def steps_during(self, ids: Sequence[int]) -> int:
        """Steps of the engine until a prompt's first token, while another request decodes: it gets a token in each."""
        assert self.llm.reset_prefix_cache()
        engine = self.llm.llm_engine
        engine.add_request("other", {"prompt_token_ids": list(words(20, 3))}, _greedy(64))
        engine.step()
        engine.add_request("job", {"prompt_token_ids": list(ids)}, _greedy(1))
        n_steps, n_tokens, is_done = 0, -1, False
        while not is_done:
            n_steps += 1
            by_name = {output.request_id: output for output in engine.step()}
            n_other = len(by_name["other"].outputs[0].token_ids) if "other" in by_name else n_tokens
            is_done = "job" in by_name
            assert n_other > n_tokens or n_steps == 1 or is_done
            n_tokens = n_other
        engine.abort_request(["other"], internal=False)
        self.drain()
        return n_steps

    def abort_after(self, n_steps: int, ids: Sequence[int]) -> None:
        """Send a prompt, and end it after some steps of the engine, in each of which another request decodes."""
        engine = self.llm.llm_engine
        engine.add_request("other", {"prompt_token_ids": list(words(20, 3))}, _greedy(64))
        engine.step()
        engine.add_request("job", {"prompt_token_ids": list(ids)}, _greedy(4))
        for _ in range(n_steps):
            engine.step()
        engine.abort_request(["job", "other"], internal=False)
        self.drain()

    def drain(self) -> None:
        """Step until all is done, and what was aborted is freed."""
        for _ in range(8):
            self.llm.llm_engine.step()
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    @property
    def runner(self) -> Any:
        """The worker's job runner."""
        return self.connector.queue.runner


def _greedy(n: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False)


def _answer(output: Any) -> Answer:
    first = output.outputs[0].logprobs[0]
    logprobs = torch.full((max(first) + 1,), -torch.inf)
    logprobs[list(first)] = torch.tensor([value.logprob for value in first.values()])
    report = (output.kv_transfer_params or {}).get("blendserve", {})
    return Answer(tuple(output.outputs[0].token_ids), logprobs, report, output.num_cached_tokens or 0)


@contextmanager
def serving(
    folder: Path,
    store: Path,
    extra: Mapping[str, Any] | None = None,
    failure_policy: str = "recompute",
    **options: Any,
) -> Iterator[Served]:
    """vLLM in this process over the chunks that `Own` stored."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import (
        ensure_kv_transfer_shutdown,
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    settings = {"store": str(store), "precomputed": True, **(extra or {})}
    transfer = {
        **{"kv_connector": "BlendConnector", "kv_role": "kv_both", "kv_load_failure_policy": failure_policy},
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
        yield Served(llm, get_kv_transfer_group() if has_kv_transfer_group() else None, core.scheduler)
    finally:
        ensure_kv_transfer_shutdown()
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def ranks(n: int) -> dict[str, Any]:
    """Options of vLLM: ranks of tensor parallelism, each in a process of its own."""
    worker = {"worker_extension_cls": "tests.support.vllm_worker.WorkerProbe"}
    return {"tensor_parallel_size": n, "distributed_executor_backend": "mp", **worker}


@dataclass
class World:
    """A model, chunks that blendserve's engine stored, and both engines over them."""

    own: Own
    chunks: list[TokenIds]
    served: Served

    def prompt(self, *parts: int | TokenIds, suffix: int = 40, seed: int = 7) -> TokenIds:
        """The context, chunks by number and other text, and a question."""
        ids = [i for part in parts for i in (self.chunks[part] if isinstance(part, int) else part)]
        return (*self.own.context, *ids, *words(suffix, seed))

    def full(self, ids: TokenIds) -> Tensor:
        """Log probabilities [V] of the first token by our engine's full prefill."""
        return self.own.prefill(ids, BlendConfig(method="full")).result.logits.log_softmax(-1)


CHUNK_TOKENS = 90, 80, 110, 75, 95, 105, 85, 80, 115, 100, 97, 100, *(85,) * 12  # enough to fit priors


@contextmanager
def world_of(
    kind: str, base: Path, extra: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[World]:
    """Everything in the folder `base`. extra: settings of the connector. options: of vLLM."""
    own = Own(make_model(kind, base / "model"), base / "kv")
    chunks = [words(n, seed) for seed, n in enumerate(CHUNK_TOKENS)]
    own.store_chunks(chunks)
    with serving(base / "model", base / "kv", extra, **options) as served:
        yield World(own, chunks, served)


def kl(exact: Tensor, other: Tensor) -> float:
    """Of log probabilities [V], in nats."""
    return float((exact.exp() * (exact - other)).sum())


def words(n: int, seed: int) -> TokenIds:
    """Random tokens, none of them a control token."""
    drawn = torch.randint(100, VOCAB, (n,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())
