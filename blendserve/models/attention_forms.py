"""What attention is in each layer of a model, by its configuration: stored KV, RoPE, scale, window."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from blendserve.kernels.types import AttentionSpec
from blendserve.kv import KVShape
from blendserve.models.families import RECURRENT_TYPES, Family, Setting, slides


def setting_of(config: Any, name: Setting | None) -> float | None:
    """A number from the configuration, None where the family has none or the model sets none."""
    if callable(name):
        return name(config)
    return None if name is None else cast("float | None", getattr(config, name))


NO_KV = KVShape(0, 1, 1)  # of a recurrent layer


def is_recurrent(config: Any, family: Family, l: int) -> bool:
    """Whether layer l has a state in place of KV, which is empty if it is an MLP alone."""
    if family.side_by_side:
        return l % 2 == 0
    return family.recurrent is not None and config.layer_types[l] in RECURRENT_TYPES


def layer_count(config: Any, family: Family) -> int:
    """How many layers a model has here."""
    return int(config.num_hidden_layers) * (1 + family.side_by_side)


def kv_layout(config: Any, family: Family) -> tuple[tuple[KVShape, ...], list[int]]:
    """The shapes of the layers that keep KV, and for each layer the one whose KV it reads."""
    n = layer_count(config, family)
    heads = config.num_attention_heads
    shapes = []
    sources = list(range(n))
    for l in range(n - (getattr(config, "num_kv_shared_layers", None) or 0)):
        if is_recurrent(config, family, l):
            shapes.append(NO_KV)
            continue
        if family.latent:
            shapes.append(KVShape(1, config.qk_rope_head_dim, config.kv_lora_rank))
            continue
        layer = layer_settings(config, l)
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        value_dim = int(setting_of(layer, family.value_dim) or dim)
        shapes.append(KVShape(family.kv_heads(layer, l), dim, value_dim))
    for l in range(len(shapes), n):  # each reads the KV of the last layer of its type
        sources[l] = max(m for m in range(len(shapes)) if config.layer_types[m] == config.layer_types[l])
    return tuple(shapes), sources


def layer_settings(config: Any, l: int) -> Any:
    """The configuration of layer l, where a model's layers have settings of their own."""
    by_layer = getattr(config, "per_layer_config", None)
    if isinstance(by_layer, Mapping):  # as in config.json
        return SimpleNamespace(**{**vars(config), **by_layer.get(str(l), {})})
    return config if by_layer is None or not config.is_heterogeneous else by_layer[l]


def turn_of(config: Any, family: Family, l: int) -> str | None:
    """The RoPE angles of layer l: None = none, "" = the model's only ones, else those of this layer type, or base."""
    if family.rope_bases:
        return str(config.layer_rope_theta[l]) if config.layer_rope_theta[l] else None
    if is_recurrent(config, family, l) or not family.rotates(config, l):
        return None
    return str(config.layer_types[l]) if family.typed_rope else ""


def rope_of(config: Any, family: Family, turn: str) -> tuple[Any, str]:
    """A configuration with these angles' parameters, and the layer type that has them, "" = all."""
    if not family.rope_bases:
        return config, turn
    config = copy(config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": float(turn)}
    return config, ""


def attention_spec(
    config: Any, family: Family, l: int, head_dim: int, tensors: Mapping[str, Tensor]
) -> AttentionSpec:
    has_window = family.windows == "all" or (family.windows == "typed" and slides(config, l))
    scale = family.attention_scale(config) if family.attention_scale else head_dim**-0.5
    window = config.sliding_window if has_window else None
    sinks = tensors.get(f"model.layers.{l}.self_attn.sinks") if family.sinks else None
    softcap = setting_of(config, family.softcap)
    return AttentionSpec(scale, window, softcap, None if sinks is None else sinks.float())
