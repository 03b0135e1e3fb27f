"""A borrowed Hugging Face causal LM, seen as the steps that blending needs. The only file that knows its internals.

    embed -> L x (project -> [place KV, attend] -> finish) -> logits

A layer is run in two halves because blending acts between them: `project` gives queries, keys *before RoPE* and values
of the active rows; the caller rotates, places and attends; `finish` does the rest of the layer. The model's own modules
and its own rotation are called, on rows without a batch dimension, and nothing of the model is changed or patched.

How the families differ is in families.py; here their plans are resolved once into the modules of each layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from blendserve.kernels.ops import attention_backends, rotate
from blendserve.kernels.rotary import OwnFunction, Rotary
from blendserve.kernels.types import AttentionSpec, Rope, Ropes
from blendserve.models.families import Family, check_supported
from blendserve.models.linear_layers import call_linear, call_module

Module = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Projected:
    """The active rows of one layer on their way to attention."""

    q: Tensor  # [H, S, D] before RoPE
    k: Tensor  # [K, S, D] before RoPE
    v: Tensor  # [K, S, D]


class Adapter:
    """The steps of one model. Stateless between calls, so that any number of requests may share it."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ModelUnsupported, with the reason, for a model on which blending would not be right."""
        config = cast(Any, model).config
        self.family = family = check_supported(config)
        self.model = model
        self._body = cast(Any, model).model
        layers = list(self._body.layers)[: config.num_hidden_layers]
        self.n_layers: int = config.num_hidden_layers
        self.n_heads: int = config.num_attention_heads
        self.n_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = layers[0].self_attn.head_dim
        self.context_limit: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.specs = [_attention_spec(config, family, l, layer.self_attn) for l, layer in enumerate(layers)]
        self._layers = [_Layer(self, layer, _setting(config, family.residual_scale)) for layer in layers]
        self._turns = [_turn(config, family, l, layer.self_attn) for l, layer in enumerate(layers)]
        self._embedding_scale = _setting(config, family.embedding_scale)
        self._logits_factor = _logits_factor(config, family)
        self._logits_cap = _setting(config, family.logits_softcap)
        self.rotary = self._rotary(_rotation_of(layers[0].self_attn))

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self._body.embed_tokens.weight.device)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self._body.embed_tokens.weight.dtype)

    @property
    def group(self) -> int:
        """Query heads that share a kv head: H / K."""
        return self.n_heads // self.n_kv_heads

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows that its layers have; None = a layer without."""
        return {spec.window for spec in self.specs}

    @property
    def attention_backends(self) -> tuple[str, str]:
        """Who attends in its first layer: for rows that stand side by side, and for rows anywhere."""
        heads = self.n_heads, self.n_kv_heads, self.head_dim
        return attention_backends(*heads, self.dtype, self.device, self.specs[0])

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.dtype.itemsize

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [S] -> hidden [S, E]."""
        hidden = cast(Tensor, self._body.embed_tokens(ids))
        return hidden if self._embedding_scale is None else hidden * self._embedding_scale

    def rope(self, positions: Tensor) -> Ropes:
        """The model's own cos and sin at these positions [S], for each layer."""
        made = {turn: self._rope_of(turn, positions) for turn in set(self._turns)}
        return tuple(made[turn] for turn in self._turns)

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """Apply RoPE to x [heads, S, D] as the model's own function does, in the model's own dtype."""
        return rotate(x, rope, self.rotary)

    def project(self, l: int, hidden: Tensor) -> Projected:
        """First half of layer l: hidden [S, E] -> queries, keys and values of these rows, before RoPE."""
        layer = self._layers[l]
        x = hidden if layer.before_attention is None else layer.before_attention(hidden)
        q, k, v = layer.qkv(x)
        if layer.norms_width:
            q, k = layer.attn.q_norm(q), layer.attn.k_norm(k)
        q, k, v = (_heads(part, self.head_dim) for part in (q, k, v))
        if layer.norms_heads:
            q, k = layer.attn.q_norm(q), layer.attn.k_norm(k)
        return Projected(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))

    def finish(self, l: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Second half of layer l: hidden [S, E] and attention's output [S, H * D] -> hidden [S, E]."""
        return self._layers[l].finish(hidden, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden [S, E] -> logits [S, V]."""
        logits = call_linear(cast(Any, self.model).lm_head, self._body.norm(hidden))
        if self._logits_factor is not None:
            logits = logits * self._logits_factor
        return (
            logits if self._logits_cap is None else self._logits_cap * torch.tanh(logits / self._logits_cap)
        )

    def _rotary(self, own: OwnFunction) -> Rotary:
        """The model's own rotation, run once on a few positions to see which form it has."""
        ropes = self.rope(torch.arange(8, device=self.device) * 37 + 1)
        x = torch.randn(2, 8, self.head_dim, generator=torch.Generator().manual_seed(0))
        turning = next((rope for rope in ropes if rope.cos.shape[-1]), None)
        return Rotary.of(own, turning, x.to(self.device, self.dtype))

    def _rope_of(self, turn: str | None, positions: Tensor) -> Rope:
        like = torch.empty(0, device=self.device, dtype=self.dtype)
        if turn is None:
            return Rope(*like.new_empty(2, len(positions), 0))
        kind = (turn,) if turn else ()
        cos, sin = self._body.rotary_emb(like, positions[None], *kind)
        return Rope(cos[0], sin[0])


class _Layer:
    """The modules of one decoder layer in the order of its family's plan; None = the plan has none there."""

    def __init__(self, adapter: Adapter, layer: Any, residual_scale: float | None) -> None:
        family, attn = adapter.family, layer.self_attn
        self.before_attention = _module(layer, family.before_attention)
        self.after_attention = _module(layer, family.after_attention)
        self.before_mlp = self.before_attention if family.parallel else _module(layer, family.before_mlp)
        self.after_mlp = _module(layer, family.after_mlp)
        self.parallel = family.parallel
        self.residual_scale = residual_scale
        self.norms_width = family.qk_norm == "width"
        self.norms_heads = family.qk_norm == "head" and hasattr(attn, "q_norm")  # optional in Cohere's
        self.attn, self._fused = attn, family.fused_qkv
        self._sizes = [
            n * adapter.head_dim for n in (adapter.n_heads, adapter.n_kv_heads, adapter.n_kv_heads)
        ]
        self._mlp, self._experts = getattr(layer, family.mlp), family.experts

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [S, E] -> [S, H * D], [S, K * D], [S, K * D]"""
        if self._fused:
            return torch.split(call_linear(self.attn.qkv_proj, x), self._sizes, dim=-1)
        attn = self.attn
        return tuple(call_linear(part, x) for part in (attn.q_proj, attn.k_proj, attn.v_proj))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        added = call_linear(self.attn.o_proj, attended)
        if self.after_attention is not None:
            added = self.after_attention(added)
        between = self._add(hidden, added)
        x = hidden if self.parallel else between
        if self.before_mlp is not None:
            x = self.before_mlp(x)
        x = self._mlp(x[None])[0] if self._experts else call_module(self._mlp, x)
        if self.after_mlp is not None:
            x = self.after_mlp(x)
        return self._add(between, x)

    def _add(self, hidden: Tensor, x: Tensor) -> Tensor:
        return hidden + x if self.residual_scale is None else hidden + x * self.residual_scale


def _module(layer: Any, name: str | None) -> Module | None:
    return None if name is None else cast(Module, getattr(layer, name))


def _setting(config: Any, name: str | None) -> float | None:
    """A number from the configuration, None where the family has none or the model sets none."""
    return None if name is None else cast("float | None", getattr(config, name))


def _logits_factor(config: Any, family: Family) -> float | None:
    divisor = _setting(config, family.logits_divisor)
    return _setting(config, family.logits_scale) if divisor is None else 1 / divisor


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[S, heads * D] -> [S, heads, D]"""
    return x.view(x.shape[0], -1, head_dim)


def _rotation_of(attn: nn.Module) -> OwnFunction:
    """The function that this model itself rotates with: it lives beside its attention class."""
    return cast(OwnFunction, sys.modules[type(attn).__module__].apply_rotary_pos_emb)


def _turn(config: Any, family: Family, l: int, attn: Any) -> str | None:
    """Which angles layer l turns by: None = none, "" = the model's only ones, else those of this layer type."""
    if not family.rotates(attn):
        return None
    return str(config.layer_types[l]) if family.typed_rope else ""


def _attention_spec(config: Any, family: Family, l: int, attn: Any) -> AttentionSpec:
    slides = family.windows == "all" or (
        family.windows == "typed" and config.layer_types[l] == "sliding_attention"
    )
    window = config.sliding_window if slides else None
    return AttentionSpec(attn.scaling, window, _setting(config, family.softcap))
