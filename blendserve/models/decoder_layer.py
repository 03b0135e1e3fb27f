"""The parts of one decoder layer, in the order in which they run, made from a model's tensors by name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from blendserve.kernels.norm import Norm
from blendserve.kernels.types import Activation
from blendserve.models.attention_forms import setting_of
from blendserve.models.families import Family
from blendserve.models.layers import Function, LatentAttention, Parts
from blendserve.models.recurrent import RecurrentMixer


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's parts, in the order in which they run; None or () = the family has none there."""

    before_attention: Norm | None
    # Three linear layers, or one that gives all; two if values are keys before their norm, of queries alone if the layer
    # reads the KV of another.
    qkv: tuple[Function, ...]
    qk_norms: tuple[Norm, ...]
    v_norm: Norm | None
    latent: LatentAttention | None  # in place of these
    mixer: RecurrentMixer | None  # in place of attention and `o`
    gate: Function | None  # of attention's output
    o: Function
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: Function | None  # an MLP, or the module of a mixture of experts
    after_mlp: Norm | None
    # norm of the MLP's output; experts that read what the MLP's norm reads
    beside_mlp: tuple[Norm, Function] | None
    layer_input: tuple[Function, Function, Norm, Activation] | None  # of the layer's own embedding
    scale: Tensor | None  # of what the layer gives

    @property
    def norms(self) -> list[Norm]:
        norms = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp, *self.qk_norms
        return [norm for norm in norms if norm is not None]


def make_layer(parts: Parts, name: str, is_recurrent: bool) -> DecoderLayer:
    """Layer `name` of the model. Raises KeyError for a missing tensor, ModelUnsupported."""
    family = parts.family
    attention = f"{name}.{family.called('self_attn')}"
    norms = Family("") if is_recurrent and family.llama_norms else family

    def norm(called: str | None, eps: float | None = None) -> Norm | None:
        return None if called is None else parts.norm(f"{name}.{called}", eps)

    qkv: tuple[str, ...] = ("qkv_proj",) if family.fused_qkv else ("q_proj", "k_proj", "v_proj")
    qkv = () if family.latent or is_recurrent else qkv
    if family.v_norm:  # as a layer has them
        qkv = tuple(part for part in qkv if f"{attention}.{part}.weight" in parts.tensors)
    beside = parts.experts_beside(name)
    # Cohere's are optional.
    q_norm, k_norm = (family.called(x) for x in ("q_norm", "k_norm"))
    has_weights = f"{attention}.{q_norm}.weight" in parts.tensors
    norms_qk = family.qk_norm != "no" and (has_weights or family.plain_norm is not None)
    post_eps = setting_of(parts.config, family.post_eps)
    return DecoderLayer(
        before_attention=norm(norms.before_attention),
        qkv=tuple(
            parts.half(f"{attention}.{x}", 0) if x == family.gate else parts.linear(f"{attention}.{x}")
            for x in qkv
        ),
        qk_norms=tuple(parts.norm(f"{attention}.{x}", is_plain=True) for x in (q_norm, k_norm)[: len(qkv)])
        if norms_qk
        else (),
        v_norm=parts.norm(f"{attention}.v_norm") if family.v_norm and len(qkv) > 1 else None,
        latent=parts.latent(attention) if family.latent and not is_recurrent else None,
        mixer=parts.mixer(f"{name}.{family.recurrent}") if is_recurrent else None,
        gate=parts.gate(f"{attention}.{family.gate}") if family.gate and not is_recurrent else None,
        o=parts.scaled(nn.Identity(), str(family.recurrent))
        if is_recurrent
        else parts.linear(f"{attention}.{family.called('o_proj')}"),
        after_attention=norm(norms.after_attention, post_eps),
        before_mlp=None if family.parallel else norm(norms.before_mlp),
        mlp=parts.mlp(f"{name}.{family.mlp}") if family.mlp else None,
        after_mlp=norm(norms.after_mlp, post_eps),
        beside_mlp=None if beside is None else (parts.norm(f"{name}.post_feedforward_layernorm_1"), beside),
        layer_input=parts.layer_input(name),
        scale=parts.tensors[f"{name}.{family.layer_scale}"] if family.layer_scale else None,
    )
