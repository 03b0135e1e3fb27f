"""Llama's modules in plain torch, under the names that transformers gives them: those that the adapter runs.

Importing transformers' own takes seconds: all of torch's compiler, its distributed tensors and scipy come with it. What
is computed is the same to the bit, which quick_start.py proves for each model before these serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]  # by the names of a checkpoint


class PlainConfig(SimpleNamespace):
    """A configuration by its values."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def is_plain_llama(config: Mapping[str, Any]) -> bool:
    """Whether these modules may be what the configuration says; only a comparison tells."""
    rope = config.get("rope_parameters") or {}
    wanted = {"model_type": "llama", "hidden_act": "silu"}
    same = all(config.get(name) == value for name, value in wanted.items())
    return same and rope.get("rope_type") == "default" and "rope_theta" in rope


class PlainLlama(nn.Module):
    """Modules for an Adapter; it has no forward of its own."""

    def __init__(self, config: PlainConfig, weights: Weights) -> None:
        """Takes the weights as they are. Raises LookupError where one is missing, ValueError where one is too many."""
        super().__init__()
        left = dict(weights)
        self.config = config
        self.model = _Body(config, left)
        tied = self.model.embed_tokens.weight
        self.lm_head = _linear(left, "lm_head", tied if config.tie_word_embeddings else None)
        if left:
            raise ValueError(f"weights that no module takes: {', '.join(sorted(left))}")
        self.requires_grad_(False).eval()


class _Body(nn.Module):
    def __init__(self, config: Any, weights: Weights) -> None:
        super().__init__()
        embeddings = weights.pop("model.embed_tokens.weight")
        self.embed_tokens = _embedding(embeddings)
        layers = (_Layer(config, weights, f"model.layers.{l}") for l in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = _Norm(weights.pop("model.norm.weight"), config.rms_norm_eps)
        self.rotary_emb = _Rotary(config)


class _Layer(nn.Module):
    def __init__(self, config: Any, weights: Weights, name: str) -> None:
        super().__init__()
        self.self_attn = _Attention(config, weights, f"{name}.self_attn")
        self.mlp = _Mlp(weights, f"{name}.mlp")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, norm, _Norm(weights.pop(f"{name}.{norm}.weight"), config.rms_norm_eps))


class _Attention(nn.Module):
    def __init__(self, config: Any, weights: Weights, name: str) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, part, _linear(weights, f"{name}.{part}"))


class _Mlp(nn.Module):
    def __init__(self, weights: Weights, name: str) -> None:
        super().__init__()
        self.gate_proj = _linear(weights, f"{name}.gate_proj")
        self.up_proj = _linear(weights, f"{name}.up_proj")
        self.down_proj = _linear(weights, f"{name}.down_proj")
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """x [S, E] -> [S, E]"""
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Norm(nn.Module):
    """RMS norm that rounds before it weighs."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class _Rotary(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        dim = config.head_dim or config.hidden_size // config.num_attention_heads
        steps = torch.arange(0, dim, 2, dtype=torch.float) / dim
        self.inv_freq = 1.0 / (config.rope_parameters["rope_theta"] ** steps)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x: of the dtype wanted; positions [B, S] -> cos and sin [B, S, D]."""
        angles = positions[..., None].float() * self.inv_freq
        twice = torch.cat((angles, angles), dim=-1)
        return twice.cos().to(x.dtype), twice.sin().to(x.dtype)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [B, heads, S, D] turned by cos and sin [B, S, D]. The adapter looks for it beside the attention's class."""
    cos, sin = cos[:, None], sin[:, None]
    return (q * cos) + (_turned(q) * sin), (k * cos) + (_turned(k) * sin)


def _turned(x: Tensor) -> Tensor:
    one, other = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-other, one), dim=-1)


def _embedding(weight: Tensor) -> nn.Embedding:
    n, dim = weight.shape
    return nn.Embedding(n, dim, _weight=weight, _freeze=True)


def _linear(weights: Weights, name: str, weight: Tensor | None = None) -> nn.Linear:
    """A layer over tensors as they are: no new ones are made and filled by chance."""
    weight = weights.pop(f"{name}.weight") if weight is None else weight
    bias = weights.pop(f"{name}.bias", None)
    layer = nn.Linear(1, 1, bias=bias is not None)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
