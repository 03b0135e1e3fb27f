"""A decoder as the steps that blending needs, made from its tensors by name and the row of its family.

    embed -> L x (project -> [place KV, attend] -> finish) -> logits

A layer is run in two halves because blending acts between them: `project` gives queries, keys *before RoPE* and values
of the active rows; the caller rotates, places and attends; `finish` does the rest of the layer. How the families differ
is in families.py. transformers' own model is the reference: gate, tests and method `full` run its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blendserve.core import KVShape
from blendserve.kernels.norm import Norm
from blendserve.kernels.ops import attention_backends, rotate
from blendserve.kernels.types import AttentionSpec, Rope, Ropes
from blendserve.models.families import Family, check_supported, slides
from blendserve.models.layers import Function, Parts, RopeAngles, call_norm, norm_heads


@dataclass(frozen=True, slots=True)
class Projected:
    """The active rows of one layer on their way to attention."""

    q: Tensor  # [H, S, D] before RoPE
    k: Tensor  # [K, S, D] before RoPE
    v: Tensor  # [K, S, D]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's parts, in the order in which they run; None or () = the family has none there."""

    before_attention: Norm | None
    qkv: tuple[Function, ...]  # three linear layers, or one that gives all
    qk_norms: tuple[Norm, ...]
    gate: Function | None  # of attention's output
    o: Function
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: Function  # an MLP, or the module of a mixture of experts
    after_mlp: Norm | None

    @property
    def norms(self) -> list[Norm]:
        norms = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, *self.qk_norms
        return [norm for norm in norms if norm is not None]


class DecoderModel:
    """The steps of one model. Any number of requests may share it: it keeps nothing of a call but bound native calls."""

    def __init__(
        self, config: Any, tensors: Mapping[str, Tensor], load_reference: Callable[[], nn.Module]
    ) -> None:
        """tensors: by the names of transformers' state_dict. load_reference: called once, when it is needed.

        Raises ModelUnsupported, with the reason, for a model on which blending would not be right; KeyError for a
        missing tensor.
        """
        self.family = family = check_supported(config)
        self.config, self._load_reference = config, load_reference
        self.int8_decoding = False  # answers are decoded with an int8 copy of the weights
        self.can_capture = True  # no capture of a decoding step has failed
        self.native_layers = dict[tuple[bool, int], Any]()  # by few rows and threads (native.py)
        self.native_decoders = dict[bool, Any]()  # by int8 (runner.py)
        self.n_layers: int = config.num_hidden_layers
        self.n_heads: int = config.num_attention_heads
        self.kv_shapes, self.kv_sources = kv_layout(
            config
        )  # of the layers that keep KV; whose KV each layer reads
        self.context_limit: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.embeddings = tensors["model.embed_tokens.weight"]  # [V, E]
        self.specs = [
            _attention_spec(config, family, l, self.kv_shape(l).dim, tensors) for l in range(self.n_layers)
        ]
        parts = Parts(config, family, tensors, lambda: self.reference)
        self.layers = [_layer(parts, f"model.layers.{l}") for l in range(self.n_layers)]
        self.norm, self.lm_head = parts.norm("model.norm"), parts.linear("lm_head")
        self.reference_parts = tuple(parts.called)  # names of modules that are transformers' own
        self.residual_scale = _setting(config, family.residual_scale)
        self._embedding_scale = _embedding_scale(config, family, self.dtype)
        self._logits_factor = _logits_factor(config, family)
        self._logits_cap = _setting(config, family.logits_softcap)
        self.rotary = family.rotary
        self._turns = [_turn(config, family, l) for l in range(self.n_layers)]
        dtype = torch.float32 if family.wide_rope else self.dtype
        self._angles = {
            turn: RopeAngles(*_rope_of(config, family, turn), self.kv_shape(l).dim, family, dtype)
            for l, turn in enumerate(self._turns)
            if turn is not None
        }

    @classmethod
    def of(cls, reference: nn.Module) -> DecoderModel:
        """A transformers model in hand; its weights are shared."""
        return cls(cast(Any, reference).config, reference.state_dict(), lambda: reference)

    @cached_property
    def reference(self) -> nn.Module:
        """transformers' own model, which may only be loaded now."""
        return self._load_reference()

    @property
    def device(self) -> torch.device:
        return self.embeddings.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embeddings.dtype

    @property
    def n_kv_layers(self) -> int:
        """How many layers keep KV, the lowest ones; the others read that of earlier layers."""
        return len(self.kv_shapes)

    @property
    def has_equal_layers(self) -> bool:
        """Whether all of them keep KV of one shape."""
        return len(set(self.kv_shapes)) == 1

    def kv_shape(self, l: int) -> KVShape:
        """Of the KV that layer l reads."""
        return self.kv_shapes[self.kv_sources[l]]

    @cached_property
    def attention_forms(self) -> list[tuple[int, int | None]]:
        """Of each layer: query heads that share a kv head, H / K, and its sliding window."""
        return [(self.n_heads // self.kv_shape(l).heads, spec.window) for l, spec in enumerate(self.specs)]

    def qkv_sizes(self, l: int) -> list[int]:
        """How many numbers layer l projects to queries, keys and values."""
        heads, dim = self.kv_shape(l)
        return [n * dim for n in (self.n_heads, heads, heads)]

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows of its layers; None = a layer without."""
        return {spec.window for spec in self.specs}

    @property
    def attention_backends(self) -> tuple[str, str]:
        """The attention kernels of its first layer: for contiguous rows, and for rows anywhere."""
        heads = self.n_heads, *self.kv_shapes[0]
        return attention_backends(*heads, self.dtype, self.device, self.specs[0])

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * sum(heads * dim for heads, dim in self.kv_shapes) * self.dtype.itemsize

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [S] -> hidden [S, E]."""
        hidden = F.embedding(ids, self.embeddings)
        return hidden if self._embedding_scale is None else hidden * self._embedding_scale

    def rope(self, positions: Tensor) -> Ropes:
        """cos and sin at these positions [S], for each layer."""
        none = self.embeddings.new_empty(2, len(positions), 0)
        made = {turn: angles(positions) for turn, angles in self._angles.items()}
        return tuple(Rope(*none) if turn is None else made[turn] for turn in self._turns)

    @property
    def rope_tables(self) -> tuple[list[int], list[int]]:
        """For each layer the number of its angles among the model's different ones, -1 without RoPE; and for each number
        a layer that has these angles."""
        turns = [turn for turn in dict.fromkeys(self._turns) if turn is not None]
        numbers = [-1 if turn is None else turns.index(turn) for turn in self._turns]
        return numbers, [self._turns.index(turn) for turn in turns]

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """Apply RoPE to x [heads, S, D] in the model's own dtype."""
        return rotate(x, rope, self.rotary)

    def project(self, l: int, hidden: Tensor) -> Projected:
        """First half of layer l: hidden [S, E] -> queries, keys and values of these rows, before RoPE."""
        layer = self.layers[l]
        x = call_norm(layer.before_attention, hidden)[1]
        made = [part(x) for part in layer.qkv]
        q, k, v = made if len(made) == 3 else torch.split(made[0], self.qkv_sizes(l), dim=-1)
        if layer.qk_norms and self.family.qk_norm == "width":
            q, k = (call_norm(norm, x)[1] for norm, x in zip(layer.qk_norms, (q, k), strict=True))
        q, k, v = (x.view(len(x), -1, self.kv_shape(l).dim) for x in (q, k, v))
        if layer.qk_norms and self.family.qk_norm == "head":
            q, k = (norm_heads(norm, x) for norm, x in zip(layer.qk_norms, (q, k), strict=True))
        return Projected(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))

    def finish(self, l: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Second half of layer l: hidden [S, E] and attention's output [S, H * D] -> hidden [S, E]."""
        layer, scale = self.layers[l], self.residual_scale
        if layer.gate is not None:
            gate = layer.gate(call_norm(layer.before_attention, hidden)[1])
            attended = (attended.reshape(*gate.shape, -1) * gate[..., None]).flatten(1)
        added = layer.o(attended)
        if layer.after_attention is not None:
            added = call_norm(layer.after_attention, added)[1]
        if scale is not None:
            added = added * scale
        if self.family.parallel:
            between, x = hidden + added, call_norm(layer.before_attention, hidden)[1]
        else:
            between, x = call_norm(layer.before_mlp, hidden, added)
        x = layer.mlp(x)
        if layer.after_mlp is not None:
            x = call_norm(layer.after_mlp, x)[1]
        return between + (x if scale is None else x * scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden [S, E] -> logits [S, V]."""
        return self.scale_logits(self.lm_head(call_norm(self.norm, hidden)[1]))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The output head's numbers [S, V] as the family scales and caps them."""
        factor, cap = self._logits_factor, self._logits_cap
        if factor is not None:
            logits = logits * factor
        return logits if cap is None else cap * torch.tanh(logits / cap)


def kv_layout(config: Any) -> tuple[tuple[KVShape, ...], list[int]]:
    """The shapes of the layers that keep KV, and for each layer the one whose KV it reads."""
    n, heads = config.num_hidden_layers, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return (KVShape(config.num_key_value_heads, dim),) * n, list(range(n))


def _layer(parts: Parts, name: str) -> DecoderLayer:
    family, attention = parts.family, f"{name}.self_attn"

    def norm(called: str | None) -> Norm | None:
        return None if called is None else parts.norm(f"{name}.{called}")

    qkv = ("qkv_proj",) if family.fused_qkv else ("q_proj", "k_proj", "v_proj")
    # Cohere's are optional.
    norms_qk = family.qk_norm != "no" and f"{attention}.q_norm.weight" in parts.tensors
    return DecoderLayer(
        before_attention=norm(family.before_attention),
        qkv=tuple(parts.linear(f"{attention}.{part}") for part in qkv),
        qk_norms=tuple(parts.norm(f"{attention}.{x}_norm") for x in "qk") if norms_qk else (),
        gate=parts.gate(f"{attention}.{family.gate}") if family.gate else None,
        o=parts.linear(f"{attention}.o_proj"),
        after_attention=norm(family.after_attention),
        before_mlp=None if family.parallel else norm(family.before_mlp),
        mlp=parts.mlp(f"{name}.{family.mlp}"),
        after_mlp=norm(family.after_mlp),
    )


def _setting(config: Any, name: str | None) -> float | None:
    """A number from the configuration, None where the family has none or the model sets none."""
    return None if name is None else cast("float | None", getattr(config, name))


def _embedding_scale(config: Any, family: Family, dtype: torch.dtype) -> float | None:
    if family.embedding_scale == "sqrt(hidden_size)":
        return float(torch.tensor(config.hidden_size**0.5, dtype=dtype))  # rounded, as Gemma does
    if family.embedding_scale == "mup_enabled":
        return float(config.hidden_size**0.5) if config.mup_enabled else None
    return _setting(config, family.embedding_scale)


def _logits_factor(config: Any, family: Family) -> float | None:
    divisor = _setting(config, family.logits_divisor)
    return _setting(config, family.logits_scale) if divisor is None else 1 / divisor


def _turn(config: Any, family: Family, l: int) -> str | None:
    """The RoPE angles of layer l: None = none, "" = the model's only ones, else those of this layer type, or base."""
    if family.rope_bases:
        return str(config.layer_rope_theta[l]) if config.layer_rope_theta[l] else None
    if not family.rotates(config, l):
        return None
    return str(config.layer_types[l]) if family.typed_rope else ""


def _rope_of(config: Any, family: Family, turn: str) -> tuple[Any, str]:
    """A configuration with these angles' parameters, and the layer type that has them, "" = all."""
    if not family.rope_bases:
        return config, turn
    config = copy(config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": float(turn)}
    return config, ""


def _attention_spec(
    config: Any, family: Family, l: int, head_dim: int, tensors: Mapping[str, Tensor]
) -> AttentionSpec:
    has_window = family.windows == "all" or (family.windows == "typed" and slides(config, l))
    scale = family.attention_scale(config) if family.attention_scale else head_dim**-0.5
    window = config.sliding_window if has_window else None
    sinks = tensors[f"model.layers.{l}.self_attn.sinks"].float() if family.sinks else None
    return AttentionSpec(scale, window, _setting(config, family.softcap), sinks)
