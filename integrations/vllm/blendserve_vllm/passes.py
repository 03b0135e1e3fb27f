"""Rows of one prompt through vLLM's own model, eagerly, between two of its steps.

    rows   0 1 2 | 40 41 | 97      each run of adjacent rows is one "request" of the batch: its sequence ends with
    runs   ----- | ----- | --      the run, and all runs share the prompt's block table

So causal paged attention by any backend does what blending needs, and tensor parallelism, quantised weights and experts
are the model's own affair. Hooks on the attention layers see q, k and v of the pass, and are removed after it.

Stored KV is written by the backend's own writer: no cache layout is known here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context, override_forward_context, set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from blendserve.errors import ModelUnsupported
from blendserve.kernels.rotary import HALVES, INTERLEAVED, Rotary
from blendserve.kernels.types import AttentionSpec, Rope, Ropes
from blendserve.kv import KVShape

MAX_RUNS = 1024  # of a pass; buffers of metadata builders are made for as many
MIN_ROWS = 32  # a pass of fewer rows takes as long
PLACED_PER_ROW = 32  # tokens whose stored KV a CPU places in the time of a row

Hook = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""Before layer l attends: l, rotated q [H, S, D], rotated k and v [K, S, D] -> attention's output [S, H * D], or None to
let the layer attend to its paged cache."""


class PassDone(Exception):
    """A hook has seen what it needs: the layers above are not run."""


class PagedModel:
    """What blendserve's parts read of the model that vLLM runs (a `KVModel`), for a number of its heads."""

    def __init__(self, layers: Sequence[Attention], ropes: Sequence[RotaryEmbeddingBase | None], heads: int):
        """heads: how many times a rank's heads to describe; the ranks of tensor parallelism for all heads."""
        self.layers, self._rotaries = layers, ropes
        self.device: torch.device = next(iter(layers[0].buffers())).device
        self.dtype: torch.dtype = layers[0].dtype
        self.n_kv_layers, self.recurrent = len(layers), frozenset[int]()
        self.kv_shapes = [KVShape(heads * x.num_kv_heads, x.head_size, x.head_size_v) for x in layers]
        self.has_equal_layers = len(set(self.kv_shapes)) == 1 and layers[0].head_size == layers[0].head_size_v
        self.rotary: Rotary = HALVES if all(r is None or r.is_neox_style for r in ropes) else INTERLEAVED
        self.specs = [_spec(x, heads) for x in layers]
        self.attention_forms = [(x.num_heads // x.num_kv_heads, x.sliding_window) for x in layers]

    def rope(self, positions: Tensor) -> Ropes:
        """cos and sin at these positions [S], for each layer: of the model's own tables."""
        made: dict[int, Rope] = {}
        for rotary in self._rotaries:
            if id(rotary) not in made:
                empty = torch.empty(len(positions), 0, dtype=self.dtype, device=self.device)
                cos, sin = (empty, empty) if rotary is None else self._halves(rotary, positions)
                made[id(rotary)] = Rope(cos, sin)
        return tuple(made[id(rotary)] for rotary in self._rotaries)

    def _halves(self, rotary: RotaryEmbeddingBase, positions: Tensor) -> tuple[Tensor, Tensor]:
        halves = rotary.cos_sin_cache[positions].to(self.dtype).chunk(2, dim=-1)
        cos, sin = (torch.cat([half, half], dim=-1) for half in halves)
        return cos, sin

    def attended_kv(self, l: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


def _spec(layer: Attention, heads: int) -> AttentionSpec:
    impl: Any = layer.impl
    sinks = getattr(impl, "sinks", None)
    if sinks is not None and heads > 1:
        raise ModelUnsupported("attention sinks are not gathered over the ranks of tensor parallelism")
    softcap = getattr(impl, "logits_soft_cap", None) or None
    return AttentionSpec(float(impl.scale), layer.sliding_window, softcap, sinks)


class Pages:
    """The paged cache of one request, as far as a job may write: positions from `start` on."""

    def __init__(
        self, layers: Sequence[Attention], blocks: Sequence[int], block_size: int, start: int, n: int
    ):
        """n: tokens of the prompt. Blocks may hold fewer: the last token's may come later."""
        self._layers, device = layers, layers[0].kv_cache.device
        self.block_table = torch.tensor(blocks, dtype=torch.int32, device=device)
        every = torch.arange(len(blocks) * block_size)
        slots = torch.tensor(blocks, dtype=torch.long)[every // block_size] * block_size + every % block_size
        slots[:start] = -1  # vLLM's own: read, never written
        missing = torch.full((max(0, n - len(slots)),), -1)
        self.slots = torch.cat([slots[:n], missing]).to(device)
        self._tail = slots[n - 1 :].to(device)  # the last token's and those behind it in the last block

    def write(self, l: int, at: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys, after RoPE, and values [K, S, D] of layer l at positions [S]. Those before `start` are left out."""
        self._write(l, self.slots[at], keys, values)

    def clear(self, at: Tensor) -> None:
        """Zeros at positions [N] without KV yet, and behind the prompt: kernels that read whole blocks need numbers.

        A weight of 0 does not hide a NaN, and vLLM does not clear blocks that a connector fills.
        """
        at = torch.cat([self.slots[at.to(self.slots.device)], self._tail])
        for l, layer in enumerate(self._layers):
            shape = layer.num_kv_heads, len(at)
            sides = (
                at.new_zeros(*shape, dim, dtype=layer.dtype) for dim in (layer.head_size, layer.head_size_v)
            )
            self._write(l, at, *sides)

    def _write(self, l: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        layer: Any = self._layers[l]
        by_token = (x.transpose(0, 1).contiguous() for x in (keys, values))
        layer.impl.do_kv_cache_update(layer, *by_token, layer.kv_cache, slots)


class Passes:
    """Runs rows through the model. `pause` is called at layers, where a job may be suspended."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: Any, model: Any, pause: Callable[[], None]):
        """model: vLLM's. Raises ModelUnsupported, naming what is not supported."""
        self._config, self._model, self.block_size = vllm_config, model, vllm_config.cache_config.block_size
        self.layers, ropes = _attention_layers(vllm_config, kv_cache_config, model)
        self.max_rows: int = vllm_config.scheduler_config.max_num_batched_tokens
        self.model = PagedModel(self.layers, ropes, 1)
        ranks = get_tensor_model_parallel_world_size()
        self.whole = PagedModel(self.layers, ropes, ranks) if ranks > 1 else self.model
        self._builders = _builders(vllm_config, kv_cache_config, self.layers, self.model.device)
        self._pause = pause
        self.slice_row_layers = 0  # row-layers between two pauses; 0: none
        self._done_row_layers = 0

    def run(self, ids: Sequence[int], at: Tensor, hook: Hook, pages: Pages | None, n_placed: int = 0) -> None:
        """Run the tokens at these positions [S], ascending. pages: None where the hook computes all attention.

        n_placed: tokens whose stored KV the hook places at each layer. A PassDone of the hook ends the pass; other errors
        of the hook are raised.
        """
        device = self.model.device
        positions = at.to(device)
        tokens = torch.tensor(ids, device=device)[positions]
        metadata, slots = self._metadata(at, pages) if pages else (None, {})
        options = {"num_tokens": len(at), "slot_mapping": slots, "skip_compiled": True}
        forward = set_forward_context(metadata, self._config, **options)
        inputs = {
            "input_ids": tokens,
            "positions": positions,
            "intermediate_tensors": None,
            "inputs_embeds": None,
        }
        work = max(len(at), MIN_ROWS) + n_placed // PLACED_PER_ROW
        with forward, self._hooks(hook, len(at), work), suppress(PassDone):
            self._model(**inputs)

    @contextmanager
    def _hooks(self, hook: Hook, n_rows: int, work: int) -> Iterator[None]:
        """work: of a layer, in rows."""
        ours, attended = get_forward_context(), dict[int, Tensor | None]()

        def before(l: int, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            if get_forward_context() is not ours:
                return  # vLLM's own step, while this pass is suspended
            self._count(work)
            layer = self.layers[l]
            q, k, v = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            heads = (q, layer.num_heads), (k, layer.num_kv_heads), (v, layer.num_kv_heads)
            attended[l] = hook(l, *(x.reshape(n_rows, n, -1).transpose(0, 1).contiguous() for x, n in heads))

        def after(l: int) -> Tensor | None:
            return attended.pop(l, None) if get_forward_context() is ours else None

        handles = []
        for l, layer in enumerate(self.layers):
            before_l = lambda _, args, kwargs, l=l: before(l, args, kwargs)  # noqa: E731
            handles.append(layer.register_forward_pre_hook(before_l, with_kwargs=True))
            handles.append(layer.register_forward_hook(lambda *_, l=l: after(l)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _count(self, work: int) -> None:
        """Suspend the job when it has run its slice. The same on all ranks: rows are counted, not seconds."""
        self._done_row_layers += work
        if self.slice_row_layers and self._done_row_layers >= self.slice_row_layers:
            self._done_row_layers = 0
            with override_forward_context(None):
                self._pause()

    def _metadata(self, at: Tensor, pages: Pages) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Attention metadata and slots of each layer, by name."""
        cuts = (at.diff() != 1).nonzero()[:, 0] + 1
        edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([len(at)])])
        device, starts, ends = (
            self.model.device,
            edges.to(torch.int32),
            (at[edges[1:] - 1] + 1).to(torch.int32),
        )
        slots = pages.slots[at.to(device)]
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device),
            num_reqs=len(ends),
            num_actual_tokens=len(at),
            max_query_len=int(starts.diff().max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=pages.block_table[None].repeat(len(ends), 1),
            slot_mapping=slots,
            causal=True,
            positions=at.to(device),
            seq_lens_cpu_upper_bound=ends,
        )
        made: dict[str, Any] = {}
        for builder, names in self._builders:
            made |= dict.fromkeys(names, builder.build(common_prefix_len=0, common_attn_metadata=common))
        return made, {layer.layer_name: slots for layer in self.layers}


def fill_gaps(is_active: Tensor, may_run: Tensor, most: int = MAX_RUNS) -> Tensor:
    """Active rows [T], the shortest gaps filled until there are at most `most` runs. Some rows may not run at all."""
    at = is_active.nonzero()[:, 0]
    gaps = at.diff() - 1
    before = (gaps > 0).nonzero()[:, 0]
    filled = is_active.clone()
    for i in before[gaps[before].argsort(stable=True)][: max(0, len(before) + 1 - most)].tolist():
        filled[at[i] : at[i + 1]] = True
    return filled & (may_run | is_active)


def _attention_layers(
    config: VllmConfig, kv_cache_config: Any, model: Any
) -> tuple[list[Attention], list[RotaryEmbeddingBase | None]]:
    """All layers that keep KV, from the lowest up, and what rotates their keys."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ModelUnsupported("its layers keep KV in several groups of blocks")
    context = config.compilation_config.static_forward_context
    names = sorted(groups[0].layer_names, key=extract_layer_index)
    layers, modules = [context[name] for name in names], dict(model.named_modules())
    paths = {id(module): path for path, module in modules.items()}
    ropes: list[RotaryEmbeddingBase | None] = []
    for name, layer in zip(names, layers, strict=True):
        impl = getattr(layer, "impl", None)
        if type(layer) is not Attention or layer.attn_type != AttentionType.DECODER:
            raise ModelUnsupported(f"layer {name} is {type(layer).__name__}, not plain causal attention")
        if layer.kv_sharing_target_layer_name is not None or getattr(impl, "alibi_slopes", None) is not None:
            raise ModelUnsupported(f"layer {name} shares the KV of another layer, or has ALiBi")
        if not hasattr(impl, "do_kv_cache_update"):
            raise ModelUnsupported(
                f"attention backend {layer.get_attn_backend().get_name()} has no writer of its own"
            )
        ropes.append(_rotary_of(modules[paths[id(layer)].rpartition(".")[0]]))
    if len({rope.is_neox_style for rope in ropes if rope is not None}) > 1:
        raise ModelUnsupported("its layers rotate keys in different forms")
    return layers, ropes


def _rotary_of(attention: Any) -> RotaryEmbeddingBase | None:
    """The rotary module beside an attention layer; None: its keys are not rotated."""
    found = [x for x in attention.children() if isinstance(x, RotaryEmbeddingBase)]
    named = [name for name, _ in attention.named_children() if "rot" in name]
    if not found and named:
        raise ModelUnsupported(f"it rotates keys by {type(getattr(attention, named[0])).__name__}")
    if len(found) > 1 or any(
        getattr(x, "cos_sin_cache", None) is None or hasattr(x, "mrope_section") for x in found
    ):
        raise ModelUnsupported(f"it rotates keys by {type(found[0]).__name__}")
    return found[0] if found else None


def _builders(
    config: VllmConfig, kv_cache_config: Any, layers: Sequence[Attention], device: torch.device
) -> list[tuple[Any, list[str]]]:
    """Metadata builders of our own: those of vLLM keep the metadata of its step, and room for fewer runs."""
    roomy = copy.copy(config)
    roomy.scheduler_config = copy.copy(config.scheduler_config)
    roomy.scheduler_config.max_num_seqs = max(MAX_RUNS, config.scheduler_config.max_num_seqs)
    spec, groups = kv_cache_config.kv_cache_groups[0].kv_cache_spec, list[tuple[Any, Any, list[str]]]()
    for layer in layers:
        own = spec.kv_cache_specs[layer.layer_name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        backend = layer.get_attn_backend()
        sizes = backend.get_supported_kernel_block_sizes()
        if not any(
            own.block_size % x.base == 0 if isinstance(x, MultipleOf) else own.block_size == x for x in sizes
        ):
            raise ModelUnsupported(f"{backend.get_name()} splits blocks of {own.block_size} tokens")
        for known in groups:
            if known[:2] == (backend, own):
                known[2].append(layer.layer_name)
                break
        else:
            groups.append((backend, own, [layer.layer_name]))
    return [(backend.get_builder_cls()(own, names, roomy, device), names) for backend, own, names in groups]
