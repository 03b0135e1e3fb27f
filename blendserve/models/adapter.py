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
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from blendserve.kernels.cpu.decode_step import DecodeWeights, LayerWeights, Linear
from blendserve.kernels.norm import Norm
from blendserve.kernels.ops import attention_backends, rotate
from blendserve.kernels.rotary import HALVES, OwnFunction, Rotary
from blendserve.kernels.types import AttentionSpec, Rope, Ropes
from blendserve.models.families import Family, check_supported, context_limit
from blendserve.models.linear_layers import call_linear, call_module
from blendserve.models.mlp import GatedMLPs
from blendserve.models.norms import Norms, call_norm, norm_heads
from blendserve.models.pace import as_found


@dataclass(frozen=True, slots=True)
class Projected:
    """The active rows of one layer on their way to attention."""

    q: Tensor  # [H, S, D] before RoPE
    k: Tensor  # [K, S, D] before RoPE
    v: Tensor  # [K, S, D]


class Adapter:
    """The steps of one model. Stateless between calls, so that any number of requests may share it."""

    def __init__(self, model: nn.Module, borrow: Callable[[], nn.Module] | None = None) -> None:
        """borrow: gives the Hugging Face model where `model` has only what the steps need (quick_start.py).

        Raises ModelUnsupported, with the reason, for a model on which blending would not be right.
        """
        config = cast(Any, model).config
        self.family = family = check_supported(config)
        self._runs, self._borrow = model, borrow or (lambda: model)
        self._body = cast(Any, model).model
        layers = list(self._body.layers)[: config.num_hidden_layers]
        self.n_layers: int = config.num_hidden_layers
        self.n_heads: int = config.num_attention_heads
        self.n_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = layers[0].self_attn.head_dim
        self.context_limit: int = context_limit(config)
        self.vocab_size: int = config.vocab_size
        self.specs = [_attention_spec(config, family, l, layer.self_attn) for l, layer in enumerate(layers)]
        norms, mlps, scale = Norms(), GatedMLPs(), _setting(config, family.residual_scale)
        self._layers = [_Layer(self, layer, norms, mlps, scale) for layer in layers]
        self._norm = norms.of(self._body.norm)
        self._turns = [_turn(config, family, l, layer.self_attn) for l, layer in enumerate(layers)]
        self._embedding_scale = _setting(config, family.embedding_scale)
        self._logits_factor = _logits_factor(config, family)
        self._logits_cap = _setting(config, family.logits_softcap)
        self.rotary = self._rotary(_rotation_of(layers[0].self_attn))

    @cached_property
    def model(self) -> nn.Module:
        """The Hugging Face model, which may only be loaded now."""
        return self._borrow()

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

    @property
    def rope_tables(self) -> tuple[list[int], list[int]]:
        """For each layer the number of its angles among the model's different ones, -1 without RoPE; and for each of
        those a layer that has them."""
        turns = [turn for turn in dict.fromkeys(self._turns) if turn is not None]
        numbers = [-1 if turn is None else turns.index(turn) for turn in self._turns]
        return numbers, [self._turns.index(turn) for turn in turns]

    def decode_weights(self) -> DecodeWeights:
        """The weights as the native decoding step reads them. Raises ValueError, naming the form that it lacks."""
        if self.rotary.form != HALVES:
            raise ValueError("RoPE is not by halves")
        norms = [self._norm, *(norm for layer in self._layers for norm in layer.norms)]
        form, weight = self._norm.form, self._norm.weight
        if form is None or weight is None or len({(norm.form, norm.eps) for norm in norms}) > 1:
            raise ValueError("norms are of an unknown form, or of several")
        head = cast(Any, self._runs).lm_head
        layers = [layer.decode_weights() for layer in self._layers]
        return DecodeWeights(
            layers=layers,
            specs=self.specs,
            norm=weight,
            head=(head.weight, head.bias),
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            eps=self._norm.eps,
            norm_form=form,
            residual_scale=self._layers[0].residual_scale,
        )

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The output head's numbers [S, V] as the family scales and caps them."""
        if self._logits_factor is not None:
            logits = logits * self._logits_factor
        return (
            logits if self._logits_cap is None else self._logits_cap * torch.tanh(logits / self._logits_cap)
        )

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """Apply RoPE to x [heads, S, D] as the model's own function does, in the model's own dtype."""
        return rotate(x, rope, self.rotary)

    def project(self, l: int, hidden: Tensor) -> Projected:
        """First half of layer l: hidden [S, E] -> queries, keys and values of these rows, before RoPE."""
        layer = self._layers[l]
        q, k, v = layer.qkv(call_norm(layer.before_attention, hidden)[1])
        if layer.width_norms:
            q, k = (call_norm(norm, x)[1] for norm, x in zip(layer.width_norms, (q, k), strict=True))
        q, k, v = (_heads(part, self.head_dim) for part in (q, k, v))
        if layer.head_norms:
            q, k = (norm_heads(norm, x) for norm, x in zip(layer.head_norms, (q, k), strict=True))
        return Projected(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))

    def finish(self, l: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Second half of layer l: hidden [S, E] and attention's output [S, H * D] -> hidden [S, E]."""
        return self._layers[l].finish(hidden, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden [S, E] -> logits [S, V]."""
        with as_found(len(hidden), self.device):
            logits = call_linear(cast(Any, self._runs).lm_head, call_norm(self._norm, hidden)[1])
        return self.scale_logits(logits)

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

    def __init__(
        self, adapter: Adapter, layer: Any, norms: Norms, mlps: GatedMLPs, residual_scale: float | None
    ) -> None:
        family, attn = adapter.family, layer.self_attn

        def norm(name: str | None) -> Norm | None:
            return None if name is None else norms.of(getattr(layer, name))

        self.before_attention, self.after_attention = (
            norm(family.before_attention),
            norm(family.after_attention),
        )
        self.before_mlp = self.before_attention if family.parallel else norm(family.before_mlp)
        self.after_mlp = norm(family.after_mlp)
        self.parallel = family.parallel
        self.residual_scale = residual_scale
        qk = [norms.of(x) for x in (attn.q_norm, attn.k_norm)] if _norms_qk(family, attn) else []
        self.width_norms, self.head_norms = (qk if family.qk_norm == x else [] for x in ("width", "head"))
        self.attn, self._fused = attn, family.fused_qkv
        self._sizes = [
            n * adapter.head_dim for n in (adapter.n_heads, adapter.n_kv_heads, adapter.n_kv_heads)
        ]
        self._mlp, self._experts = getattr(layer, family.mlp), family.experts
        self._gated = None if family.experts else mlps.of(self._mlp)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [S, E] -> [S, H * D], [S, K * D], [S, K * D]"""
        if self._fused:
            return torch.split(call_linear(self.attn.qkv_proj, x), self._sizes, dim=-1)
        attn = self.attn
        return tuple(call_linear(part, x) for part in (attn.q_proj, attn.k_proj, attn.v_proj))

    @property
    def norms(self) -> list[Norm]:
        around = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp
        return [norm for norm in (*around, *self.width_norms, *self.head_norms) if norm is not None]

    def decode_weights(self) -> LayerWeights:
        """Raises ValueError, naming the form that the native step lacks."""
        if self.parallel or self.width_norms or self._gated is None:
            raise ValueError("the MLP stands beside attention, has experts, or norms are over all heads")
        before, between = _weight(self.before_attention), _weight(self.before_mlp)
        if before is None or between is None:
            raise ValueError("a layer has no norm before attention or before the MLP")
        q_norm, k_norm = map(_weight, self.head_norms or (None, None))
        attn, down = self.attn, self._gated.down
        q, k, v = self._qkv_weights()
        gate, up = self._gated.inner_weights
        return LayerWeights(
            norm_before_attention=before,
            q=q,
            k=k,
            v=v,
            head_norms=(q_norm, k_norm),
            o=(attn.o_proj.weight, attn.o_proj.bias),
            norm_after_attention=_weight(self.after_attention),
            norm_before_mlp=between,
            gate=gate,
            up=up,
            down=(down.weight, down.bias),
            norm_after_mlp=_weight(self.after_mlp),
        )

    def _qkv_weights(self) -> list[Linear]:
        attn = self.attn
        if not self._fused:
            return [(part.weight, part.bias) for part in (attn.q_proj, attn.k_proj, attn.v_proj)]
        weights, bias = torch.split(attn.qkv_proj.weight, self._sizes), attn.qkv_proj.bias
        biases = (None,) * 3 if bias is None else torch.split(bias, self._sizes)
        return list(zip(weights, biases, strict=True))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        added = call_linear(self.attn.o_proj, attended)
        if self.after_attention is not None:
            added = call_norm(self.after_attention, added)[1]
        if self.residual_scale is not None:
            added = added * self.residual_scale
        if self.parallel:
            between, x = hidden + added, call_norm(self.before_mlp, hidden)[1]
        else:
            between, x = call_norm(self.before_mlp, hidden, added)
        x = self._feed(x)
        if self.after_mlp is not None:
            x = call_norm(self.after_mlp, x)[1]
        if self.residual_scale is not None:
            x = x * self.residual_scale
        return between + x

    def _feed(self, x: Tensor) -> Tensor:
        if self._experts:
            return cast(Tensor, self._mlp(x[None])[0])
        return call_module(self._mlp, x) if self._gated is None else self._gated(x)


def _norms_qk(family: Family, attn: Any) -> bool:
    return family.qk_norm != "no" and hasattr(attn, "q_norm")  # optional in Cohere's


def _setting(config: Any, name: str | None) -> float | None:
    """A number from the configuration, None where the family has none or the model sets none."""
    return None if name is None else cast("float | None", getattr(config, name))


def _logits_factor(config: Any, family: Family) -> float | None:
    divisor = _setting(config, family.logits_divisor)
    return _setting(config, family.logits_scale) if divisor is None else 1 / divisor


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


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
