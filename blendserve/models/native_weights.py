"""A model's weights as native calls read them, where its forms have kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blendserve.kernels.cpu.decoder import DecodeWeights, LayerWeights
from blendserve.kernels.norm import Norm
from blendserve.kernels.rotary import HALVES
from blendserve.models.layers import MLP, Linear
from blendserve.models.model import DecoderLayer, DecoderModel


def decode_weights(model: DecoderModel) -> DecodeWeights:
    """The weights as the native step reads them. Raises ValueError, naming the form that it lacks."""
    if model.rotary.form != HALVES:
        raise ValueError("RoPE is not by halves")
    norms = [model.norm, *(norm for layer in model.layers for norm in layer.norms)]
    form, weight = model.norm.form, model.norm.weight
    if form is None or weight is None or len({(norm.form, norm.eps) for norm in norms}) > 1:
        raise ValueError("norms are of an unknown form, or of several")
    return DecodeWeights(
        layers=[_layer_weights(model, layer) for layer in model.layers],
        specs=model.specs,
        norm=weight,
        head=_tensors(model.lm_head),
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        eps=model.norm.eps,
        norm_form=form,
        residual_scale=model.residual_scale,
    )


def _layer_weights(model: DecoderModel, layer: DecoderLayer) -> LayerWeights:
    mlp, width_norms = layer.mlp, layer.qk_norms and model.family.qk_norm == "width"
    if model.family.parallel or width_norms:
        raise ValueError("the MLP stands beside attention, or norms are over all heads")
    if not isinstance(mlp, MLP) or not mlp.is_gated or not mlp.activation.is_silu:
        raise ValueError("the MLP has experts, no gate or another activation than SiLU")
    before, between = _weight(layer.before_attention), _weight(layer.before_mlp)
    if before is None or between is None:
        raise ValueError("a layer has no norm before attention or before the MLP")
    q, k, v = _split(layer.qkv, model.qkv_sizes)
    half = _tensors(mlp.down)[0].shape[1]
    gate, up = _split(mlp.inner, (half, half))
    q_norm, k_norm = map(_weight, layer.qk_norms or (None, None))
    return LayerWeights(
        norm_before_attention=before,
        q=q,
        k=k,
        v=v,
        head_norms=(q_norm, k_norm),
        o=_tensors(layer.o),
        norm_after_attention=_weight(layer.after_attention),
        norm_before_mlp=between,
        gate=gate,
        up=up,
        down=_tensors(mlp.down),
        norm_after_mlp=_weight(layer.after_mlp),
    )


def _tensors(part: object) -> tuple[Tensor, Tensor | None]:
    if not isinstance(part, Linear):
        raise ValueError("a linear layer is quantised")
    return part.weight, part.bias


def _split(parts: Sequence[object], sizes: Sequence[int]) -> list[tuple[Tensor, Tensor | None]]:
    """The weights of linear layers, a fused one split into rows of these sizes."""
    if len(parts) > 1:
        return [_tensors(part) for part in parts]
    weight, bias = _tensors(parts[0])
    biases = [None] * len(sizes) if bias is None else torch.split(bias, list(sizes))
    return list(zip(torch.split(weight, list(sizes)), biases, strict=True))


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight
