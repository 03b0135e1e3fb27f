"""A model's layers in native calls, where its forms have kernels: its weights as these read them, and the two halves of
a layer around attention. Decoding steps are in runner.py.

Native calls run the kernels of the layer loop (forward.py) in the same order, so the bits are the same. Decoding steps
are equal to rounding where the loop's linear layers or attention are others: torch's, as in fp32, or AMX's. The loop
serves everywhere else: for other forms, and for passes whose linear layers are faster in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from blendserve.kernels import switches
from blendserve.kernels.cpu.bindings import FEW, GATED
from blendserve.kernels.cpu.decoder import DecodeWeights, LayerTensors, NativeLayers, Weight, unsupported
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.norm import Norm
from blendserve.kernels.ops import linear, packed_linear
from blendserve.kernels.packed import PackedMatrix
from blendserve.kernels.rotary import HALVES
from blendserve.models.decoder_layer import DecoderLayer
from blendserve.models.layers import MLP, Linear
from blendserve.models.model import DecoderModel

_TITLES = {f"{level.title} kernel": level for level in LEVELS.values()}


def native_layers(model: DecoderModel, n_rows: int) -> NativeLayers | None:
    """Native layers for a pass of n_rows; None: the layer loop runs. Bound once for few rows and once for more."""
    if model.device.type != "cpu" or torch.is_grad_enabled() or not switches.is_native_on():
        return None
    bound = model.native_layers
    key = (n_rows <= FEW, torch.get_num_threads())
    if key not in bound:
        bound[key] = None  # while the comparison runs the loop
        bound[key] = _bind(model, FEW if n_rows <= FEW else FEW + 1)
    native: NativeLayers | None = bound[key]
    return native


def _bind(model: DecoderModel, n_rows: int) -> NativeLayers | None:
    try:
        weights = native_weights(model)
    except ValueError:
        return None
    matrices = weights.layers[0].matrices
    names = {_backend(x, n_rows) for x in matrices}
    level = _TITLES.get(names.pop()) if len(names) == 1 else None
    if level is None or "layer_qkv" not in level.sources or unsupported(level, weights):
        return None
    native = NativeLayers(level, weights, model.rope_tables[0])
    return native if _is_equal(model, native, n_rows) else None


def _backend(weight: Weight, n_rows: int) -> str:
    rows = torch.zeros(n_rows, weight.shape[1], dtype=weight.dtype)
    if isinstance(weight, PackedMatrix):
        return packed_linear.select(rows, weight, None).name
    return linear.select(rows, weight, None).name


@torch.inference_mode()
def _is_equal(model: DecoderModel, native: NativeLayers, n_rows: int) -> bool:
    """Whether the first and the last layer give the loop's bits, for random rows."""
    generator = torch.Generator().manual_seed(0)
    ropes = model.rope(3 * torch.arange(n_rows))
    pairs: list[tuple[Tensor, Tensor]] = []
    for l in {0, model.n_layers - 1}:
        hidden, attended = (
            torch.randn(n_rows, width, generator=generator).to(model.dtype)
            for width in (model.embeddings.shape[1], model.qkv_sizes(0)[0])
        )
        fresh = model.project(l, hidden)
        rotated = model.rotate(fresh.q, ropes[l]), model.rotate(fresh.k, ropes[l])
        expected = fresh.q, fresh.k, fresh.v, *rotated, cast(Tensor, model.finish(l, hidden, attended))
        found = *native.qkv(l, hidden, ropes[l]), native.out(l, hidden, attended)
        pairs += zip(found, expected, strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def native_weights(model: DecoderModel) -> DecodeWeights:
    """The weights as native calls read them. Raises ValueError, naming the form that has no kernel."""
    if model.rotary != HALVES or model.family.wide_rope:
        raise ValueError("RoPE is not by halves, or in fp32")
    if (
        model.family.latent
        or len(set(model.query_heads)) > 1
        or not model.has_equal_layers
        or model.n_kv_layers < model.n_layers
    ):
        raise ValueError("layers differ in shape, or read the KV of others")
    if model.family.parallel or model.family.qk_norm == "width" or model.family.gate:
        raise ValueError(
            "the MLP is parallel to attention, norms are over all heads, or attention has a gate"
        )
    rope = model.rope(torch.zeros(1, dtype=torch.long, device=model.device))[0]
    has_sinks = any(spec.sinks is not None for spec in model.specs)
    if model.dtype != torch.float32 and (rope.query_scale is not None or has_sinks):
        raise ValueError("attention has sinks or scaled queries: their kernels are proven in fp32 alone")
    norms = [model.norm, *(norm for layer in model.layers for norm in layer.norms)]
    form = model.norm.form
    weight = model.norm.weight
    if form is None or weight is None or len({(norm.form, norm.eps) for norm in norms}) > 1:
        raise ValueError("norms are of an unknown form, or of several")
    return DecodeWeights(
        layers=[_layer_tensors(model, layer) for layer in model.layers],
        specs=model.specs,
        norm=weight,
        head=_linear(model.lm_head),
        n_heads=model.query_heads[0],
        n_kv_heads=model.kv_shapes[0].heads,
        head_dim=model.kv_shapes[0].dim,
        inner=model.config.intermediate_size,
        eps=model.norm.eps,
        norm_form=form,
        residual_scale=model.residual_scale,
        activation=cast(MLP, model.layers[0].mlp).activation,
    )


def _layer_tensors(model: DecoderModel, layer: DecoderLayer) -> LayerTensors:
    mlp = layer.mlp
    before = _weight(layer.before_attention)
    between = _weight(layer.before_mlp)
    if not isinstance(mlp, MLP) or not mlp.is_gated or mlp.activation not in GATED:
        raise ValueError("the MLP has experts, no gate or another activation than SiLU and GELU by tanh")
    if before is None or between is None:
        raise ValueError("a layer has no norm before attention or before the MLP")
    qkv = _split(layer.qkv, model.qkv_sizes(0))
    head_norms = map(_weight, layer.qk_norms or (None, None))
    down = _linear(mlp.down)
    gate_up = _split(mlp.inner, [down[0].shape[1]] * 2)
    matrices, biases = zip(*qkv, _linear(layer.o), *gate_up, down, strict=True)
    norms = before, *head_norms, _weight(layer.after_attention), between, _weight(layer.after_mlp)
    return LayerTensors(matrices, biases, norms)


def _linear(part: object) -> tuple[Weight, Tensor | None]:
    if not isinstance(part, Linear):
        raise ValueError("a linear layer is quantised")
    return part.weight, part.bias


def _split(parts: Sequence[object], sizes: Sequence[int]) -> list[tuple[Weight, Tensor | None]]:
    """The weights of linear layers, a fused one split into rows of these sizes."""
    if len(parts) > 1:
        return [_linear(part) for part in parts]
    weight, bias = _linear(parts[0])
    biases = [None] * len(sizes) if bias is None else torch.split(bias, list(sizes))
    return list(zip(weight.split(list(sizes)), biases, strict=True))


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight
