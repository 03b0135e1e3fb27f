"""A decoder as the steps that blending needs, made from its tensors by name and the row of its family.

    embed -> L x (project -> [place KV, attend] -> finish) -> logits

A layer is run in two halves because blending acts between them: `project` gives queries, keys *before RoPE* and values
of the active rows; the caller rotates, places and attends; `finish` does the rest of the layer. How the families differ
is in families.py. transformers' own model is the reference: gate, tests and method `full` run its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blendserve.forks import begin_computing
from blendserve.kernels.ops import attention_backends, rotate, take
from blendserve.kernels.packed import PackedMatrix
from blendserve.kernels.types import Rope, Ropes
from blendserve.kv import KVShape
from blendserve.models.attention_forms import (
    attention_spec,
    is_recurrent,
    kv_layout,
    layer_count,
    rope_of,
    setting_of,
    turn_of,
)
from blendserve.models.decoder_layer import make_layer
from blendserve.models.families import Family
from blendserve.models.layers import (
    LayerEmbeddings,
    Parts,
    RopeAngles,
    call_norm,
    norm_heads,
)
from blendserve.models.recurrent import SEAM, RecurrentMixer
from blendserve.models.refusals import check_supported


@dataclass(frozen=True, slots=True)
class Projected:
    """The active rows of one layer on their way to attention."""

    q: Tensor  # [H, S, D] before RoPE
    k: Tensor  # [K, S, D] before RoPE
    v: Tensor  # [K, S, D]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states of a family whose layers add embeddings of their own."""

    x: Tensor  # [S, E]
    by_layer: Tensor  # [S, L, I]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: Tensor | slice) -> Hidden:
        return Hidden(self.x[rows], self.by_layer[rows])


States: TypeAlias = "Tensor | Hidden"  # hidden states of rows [S, E], as the steps below hand them on


class DecoderModel:
    """The steps of one model. Any number of requests may share it: it keeps nothing of a call but bound native calls."""

    def __init__(
        self, config: Any, tensors: Mapping[str, Any], load_reference: Callable[[], nn.Module]
    ) -> None:
        """tensors: by the names of transformers' state_dict; matrices may be packed. load_reference: called if need be.

        Raises ModelUnsupported, with the reason, for a model on which blending would not be right; KeyError for a
        missing tensor.
        """
        self.family = family = check_supported(config)
        self.config = config
        self.tensors = tensors
        self._load_reference = load_reference
        self.decodes_in_int8 = False  # answers, approximately (runner.py)
        self.can_capture = True  # no capture of a decoding step has failed
        self.native_layers = dict[tuple[bool, int], Any]()  # by few rows and threads (native.py)
        self.native_decoders = dict[bool, Any]()  # by whether they are approximate (runner.py)
        self.n_layers = layer_count(config, family)
        by_layer = getattr(config, "num_attention_heads_per_layer", None)
        self.query_heads: list[int] = by_layer or [config.num_attention_heads] * self.n_layers
        # of the layers that keep KV; whose KV each layer reads
        self.kv_shapes, self.kv_sources = kv_layout(config, family)
        self.recurrent = frozenset(l for l in range(self.n_layers) if is_recurrent(config, family, l))
        self.context_limit: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        parts = Parts(config, family, tensors, lambda: self.reference)
        self.embeddings: Tensor | PackedMatrix = parts.embeddings  # [V, E]
        self.specs = [
            attention_spec(config, family, l, self.kv_shape(l).dim, tensors) for l in range(self.n_layers)
        ]
        self.layers = [
            make_layer(parts, f"model.layers.{self.own_layer(l)}", l in self.recurrent)
            for l in range(self.n_layers)
        ]
        self._layer_embeddings = LayerEmbeddings.of(parts)
        self.norm = parts.norm(f"model.{family.called('norm')}", is_plain=True)
        self.lm_head = parts.linear("lm_head")
        self.reference_parts = tuple(parts.called)  # names of modules that are transformers' own
        self.residual_scale = setting_of(config, family.residual_scale)
        self._input_scale = setting_of(config, family.scales.get("attention_input"))
        self._embedding_norm = parts.norm("", is_plain=True) if family.plain_norm else None
        self._embedding_scale = _embedding_scale(config, family, self.dtype)
        self._logits_factor = _logits_factor(config, family)
        self._logits_cap = setting_of(config, family.logits_softcap)
        self.rotary = family.rotary
        self._turns = [turn_of(config, family, l) for l in range(self.n_layers)]
        dtype = torch.float32 if family.wide_rope else self.dtype
        self._angles = {
            turn: RopeAngles(*rope_of(config, family, turn), self.kv_shape(l).dim, family, dtype)
            for l, turn in enumerate(self._turns)
            if turn is not None
        }
        # the first one
        self.attention_layer = next(l for l in range(self.n_layers) if l not in self.recurrent)

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

    @cached_property
    def has_experts(self) -> bool:
        """Whether any layer has a mixture of experts; what it launches depends on the row."""
        parts = ((name, self.reference.get_submodule(name)) for name in self.reference_parts)
        names = (f"{name}.{inner}".rstrip(".") for name, part in parts for inner, _ in part.named_modules())
        return any(name.endswith(".experts") for name in names)

    @property
    def n_kv_layers(self) -> int:
        """How many layers keep KV, the lowest ones; the others read that of earlier layers."""
        return len(self.kv_shapes)

    @property
    def has_equal_layers(self) -> bool:
        """Whether all of them keep keys and values of one shape."""
        first = self.kv_shapes[0]
        return first.dim == first.value_dim and set(self.kv_shapes) == {first}

    def own_layer(self, l: int) -> int:
        """Which of transformers' layers holds layer l."""
        return l // 2 if self.family.side_by_side else l

    def kv_shape(self, l: int) -> KVShape:
        """The shape of the KV that layer l reads."""
        return self.kv_shapes[self.kv_sources[l]]

    @cached_property
    def attention_forms(self) -> list[tuple[int, int | None]]:
        """Each layer's number of query heads that share a kv head, H / K, and its sliding window."""
        attention = [self.attention_layer if l in self.recurrent else l for l in range(self.n_layers)]
        return [(self.query_heads[l] // self.kv_shape(l).heads, self.specs[l].window) for l in attention]

    def chunk_layers(self, n_tokens: int) -> list[tuple[KVShape, int]]:
        """What each layer keeps of a chunk: a shape, and how many rows, n_tokens or those of a state map."""
        mixers = {l: self.mixer(l) for l in self.recurrent}
        return [
            (mixers[l].shape, mixers[l].n_rows) if l in mixers else (shape, n_tokens)
            for l, shape in enumerate(self.kv_shapes)
        ]

    def chunk_bytes(self, n_tokens: int) -> int:
        """What a chunk of that many tokens takes, uncoded."""
        return sum(n * shape.numbers for shape, n in self.chunk_layers(n_tokens)) * self.dtype.itemsize

    def qkv_sizes(self, l: int) -> list[int]:
        """How many numbers layer l projects to queries, keys and values."""
        heads, dim, value_dim = self.kv_shape(l)
        return [self.query_heads[l] * dim, heads * dim, heads * value_dim]

    @property
    def seam(self) -> int:
        """How many tokens at a chunk's beginning are computed in every prompt."""
        return SEAM if self.recurrent else 0

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows of its layers; None = a layer without."""
        return {spec.window for spec in self.specs}

    @property
    def attention_backends(self) -> tuple[str, str]:
        """The attention kernels of its first layer: for contiguous rows, and for rows anywhere."""
        l = self.attention_layer
        heads, *dims = self.kv_shapes[l]
        kv = (torch.zeros(heads, 128, dim, dtype=self.dtype, device=self.device) for dim in dims)
        keys, values = self.attended_kv(l, *kv)
        return attention_backends(
            keys.new_zeros(self.query_heads[l], 64, keys.shape[-1]), keys, values, self.specs[l]
        )

    @property
    def kv_layers(self) -> str:
        """What its layers keep of a token, in words."""
        runs = [(shape, len(list(group))) for shape, group in groupby(sorted(self.kv_shapes)) if shape.heads]
        told = (
            f"{n} layers x {heads} heads x {dim if dim == value_dim else f'({dim} + {value_dim})'} dims"
            for (heads, dim, value_dim), n in runs
        )
        shared = self.n_layers - self.n_kv_layers
        states = sum(self.mixer(l).has_state for l in self.recurrent)
        others = [f"{shared} layers that read others'"] if shared else []
        others += (
            [f"{self.chunk_bytes(0):,} bytes more a chunk for {states} recurrent layers"] if states else []
        )
        return ", ".join((*told, *others))

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(shape.numbers for shape in self.kv_shapes) * self.dtype.itemsize

    def embed(self, ids: Tensor) -> States:
        """Token ids [S] -> hidden [S, E]. Every pass begins here. Raises ModelError in a forked child."""
        begin_computing()
        hidden = call_norm(self._embedding_norm, self._rows_of(ids))[1]
        hidden = hidden if self._embedding_scale is None else hidden * self._embedding_scale
        return Hidden(hidden, self._layer_embeddings(ids, hidden)) if self._layer_embeddings else hidden

    def _rows_of(self, ids: Tensor) -> Tensor:
        if isinstance(self.embeddings, PackedMatrix):
            return take(self.embeddings, ids)
        return F.embedding(ids, self.embeddings)

    def rope(self, positions: Tensor) -> Ropes:
        """cos and sin at these positions [S], for each layer."""
        none = torch.empty(2, len(positions), 0, dtype=self.dtype, device=self.device)
        made = {turn: angles(positions) for turn, angles in self._angles.items()}
        return tuple(Rope(*none) if turn is None else made[turn] for turn in self._turns)

    @property
    def rope_tables(self) -> tuple[list[int], list[int]]:
        """Number the model's different angles: for each layer its number, -1 without RoPE; and for each number
        a layer that has these angles."""
        turns = [turn for turn in dict.fromkeys(self._turns) if turn is not None]
        numbers = [-1 if turn is None else turns.index(turn) for turn in self._turns]
        return numbers, [self._turns.index(turn) for turn in turns]

    def rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """Apply RoPE to x [heads, S, D] in the model's own dtype."""
        return rotate(x, rope, self.rotary) if len(x) else x

    def rotate_queries(self, l: int, q: Tensor, rope: Rope) -> Tensor:
        """Queries [H, S, D] of layer l; of latent attention, the part that meets the keys."""
        if self.layers[l].latent is None:
            return self.rotate(q, rope)
        plain = q.shape[-1] - self.kv_shape(l).dim
        return torch.cat([q[..., :plain], self.rotate(q[..., plain:].contiguous(), rope)], dim=-1)

    def attended_kv(self, l: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What the queries of layer l meet, of its rotated keys and values [K, T, D]."""
        if self.layers[l].latent is None:
            return keys, values
        return torch.cat([values, keys], dim=-1), values

    def mixer(self, l: int) -> RecurrentMixer:
        """The mixer of a recurrent layer."""
        mixer = self.layers[l].mixer
        assert mixer is not None
        return mixer

    def normed(self, l: int, hidden: States) -> Tensor:
        """What attention or the mixer of layer l reads: hidden [S, E] -> [S, E]."""
        x = hidden.x if isinstance(hidden, Hidden) else hidden
        if self.family.side_by_side and l not in self.recurrent:
            x, _ = x.chunk(2, dim=-1)
        return call_norm(self.layers[l].before_attention, x)[1]

    def project(self, l: int, hidden: States) -> Projected:
        """First half of layer l: hidden [S, E] -> queries, keys and values of these rows, before RoPE.

        A layer that reads the KV of another has no keys and values: K is 0.
        """
        layer = self.layers[l]
        x = self.normed(l, hidden)
        x = x if self._input_scale is None else x * self._input_scale
        if layer.latent is not None:
            return Projected(*(part.transpose(0, 1) for part in layer.latent.project(x)))
        made = [part(x) for part in layer.qkv]
        if self.kv_sources[l] != l:
            made += [made[0][:, :0]] * 2
        elif len(made) == 2:
            made.append(made[1])
        q, k, v = made if len(made) == 3 else torch.split(made[0], self.qkv_sizes(l), dim=-1)
        if layer.qk_norms and self.family.qk_norm == "width":
            q, k = (call_norm(norm, x)[1] for norm, x in zip(layer.qk_norms, (q, k), strict=True))
        _, dim, value_dim = self.kv_shape(l)
        q, k = (x.view(len(x), x.shape[1] // dim, dim) for x in (q, k))
        v = v.view(len(v), v.shape[1] // value_dim, value_dim)
        if layer.qk_norms and self.family.qk_norm == "head":
            q, *own = (norm_heads(norm, x) for norm, x in zip(layer.qk_norms, (q, k), strict=False))
            k = own[0] if own else k
        if layer.v_norm is not None:
            v = norm_heads(layer.v_norm, v)
        return Projected(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))

    def finish(self, l: int, hidden: States, attended: Tensor) -> States:
        """Second half of layer l: hidden [S, E] and what attention [S, H * D] or a mixer [S, E] gave -> hidden [S, E]."""
        if isinstance(hidden, Hidden):
            x = self._finish(l, hidden.x, attended, hidden.by_layer[:, l])
            return Hidden(x, hidden.by_layer)
        return self._finish(l, hidden, attended)

    def _finish(self, l: int, hidden: Tensor, attended: Tensor, own: Tensor | None = None) -> Tensor:
        """own [S, I]: the layer's embedding of these rows."""
        layer = self.layers[l]
        scale = self.residual_scale
        if layer.latent is not None:
            attended = layer.latent.output(attended)
        if layer.gate is not None:
            gate = layer.gate(call_norm(layer.before_attention, hidden)[1])
            attended = (attended.reshape(*gate.shape, -1) * gate[..., None]).flatten(1)
        added = layer.o(attended)
        if (
            self.family.side_by_side
        ):  # the mixer's layer hands on [S, 2 * E]: its rows, and what it adds to them
            if layer.mixer is not None:
                return torch.cat([hidden, added], dim=-1)
            hidden, beside = hidden.chunk(2, dim=-1)
            added = beside + added
        if layer.after_attention is not None:
            added = call_norm(layer.after_attention, added)[1]
        if scale is not None:
            added = added * scale
        if self.family.parallel:
            between = hidden + added
            x = call_norm(layer.before_attention, hidden)[1]
        else:
            between, x = call_norm(layer.before_mlp, hidden, added)
        if layer.mlp is None:
            return between
        x = layer.mlp(x)
        if layer.beside_mlp is not None:
            norm, experts = layer.beside_mlp
            x = call_norm(norm, x)[1] + experts(between)
        if layer.after_mlp is not None:
            x = call_norm(layer.after_mlp, x)[1]
        out = between + (x if scale is None else x * scale)
        if layer.layer_input is not None and own is not None:
            enter, leave, norm, activation = layer.layer_input
            out = out + call_norm(norm, leave(activation(enter(out)) * own))[1]
        return out if layer.scale is None else out * layer.scale

    def logits(self, hidden: States) -> Tensor:
        """Last hidden [S, E] -> logits [S, V]."""
        hidden = hidden.x if isinstance(hidden, Hidden) else hidden
        return self.scale_logits(self.lm_head(call_norm(self.norm, hidden)[1]))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The output head's numbers [S, V] as the family scales and caps them."""
        factor = self._logits_factor
        cap = self._logits_cap
        if factor is not None:
            logits = logits * factor
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _embedding_scale(config: Any, family: Family, dtype: torch.dtype) -> float | None:
    if family.embedding_scale == "sqrt(hidden_size)":
        return float(torch.tensor(config.hidden_size**0.5, dtype=dtype))  # rounded, as Gemma does
    if family.embedding_scale == "mup_enabled":
        return float(config.hidden_size**0.5) if config.mup_enabled else None
    return setting_of(config, family.embedding_scale)


def _logits_factor(config: Any, family: Family) -> float | None:
    divisor = setting_of(config, family.logits_divisor)
    return setting_of(config, family.logits_scale) if divisor is None else 1 / divisor
