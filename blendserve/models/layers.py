"""The parts of a decoder: RoPE angles, and linear layers, norms and MLPs over tensors by name, as families have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blendserve.errors import ModelUnsupported
from blendserve.kernels.norm import RMS, Norm, NormForm
from blendserve.kernels.ops import add_norm, gated_activation, linear, packed_linear
from blendserve.kernels.packed import PackedMatrix
from blendserve.kernels.types import Activation, Rope, gelu_tanh
from blendserve.models.attention_forms import setting_of
from blendserve.models.families import Family
from blendserve.models.recurrent import RecurrentMixer

# The names that configurations have for epsilon. OLMo 1 has it in its code.
EPS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
DEFAULT_EPS = 1e-5
LATENT_EPS = 1e-6  # of latents, in the code of all families that have them
# by the names that configurations have for them
ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "gelu_pytorch_tanh": gelu_tanh}

Function = Callable[[Tensor], Tensor]


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x.float()).to(x.dtype)


class RopeAngles:
    """The angles of one kind of layer."""

    def __init__(
        self, config: Any, layer_type: str, head_dim: int, family: Family, dtype: torch.dtype
    ) -> None:
        """layer_type: a key of config.rope_parameters; "" = all layers share one set. dtype: of cos and sin."""
        parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            share = parameters.get("partial_rotary_factor", family.rope_share)
            # latent attention stores the rotated part alone
            n = head_dim if family.latent else int(head_dim * share)
            steps = torch.arange(0, n, 2, dtype=torch.float) / n
            self._frequencies = 1.0 / (parameters["rope_theta"] ** steps)
            self._scale = 1.0
        else:
            from transformers import AutoConfig, PreTrainedConfig  # seconds to import
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            own = config if isinstance(config, PreTrainedConfig) else AutoConfig.for_model(**config.to_dict())
            by_type = {"layer_type": layer_type} if layer_type else {}
            self._frequencies, self._scale = ROPE_INIT_FUNCTIONS[kind](own, **by_type)
        if family.turns_back:
            self._frequencies = -self._frequencies
        self._interleaved = family.rotary.step == 2
        self._dtype = dtype
        self._query_slope = parameters.get("llama_4_scaling_beta") if family.scaled_queries else None
        self._trained_length = parameters.get("original_max_position_embeddings")

    def __call__(self, positions: Tensor) -> Rope:
        """Positions [S] -> cos and sin [S, R], R <= D the rotated dims, and the scale of queries [S], if there is one."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None].float() * self._frequencies
        twice = (
            angles.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        )
        cos, sin = ((x * self._scale).to(self._dtype) for x in (twice.cos(), twice.sin()))
        if self._query_slope is None:
            return Rope(cos, sin)
        scale = 1 + self._query_slope * torch.log(1 + torch.floor(positions / self._trained_length))
        return Rope(cos, sin, scale.to(self._dtype))


@dataclass(frozen=True, slots=True)
class Linear:
    """x [S, I] -> [S, O]"""

    weight: Tensor | PackedMatrix  # [O, I]
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, PackedMatrix):
            return packed_linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate(x)) * up(x)), gate and up in one matrix or in two; without a gate down(act(up(x)))."""

    inner: tuple[Function, ...]  # gate and up, both fused, or up alone
    down: Function
    activation: Activation
    is_gated: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [S, E] -> [S, E]"""
        made = [part(x) for part in self.inner]
        if not self.is_gated:
            return self.down(self.activation(made[0]))
        gate, up = made if len(made) == 2 else made[0].chunk(2, dim=-1)
        return self.down(gated_activation(gate, up, self.activation))


class Parts:
    """Builds the parts of one model from its tensors."""

    def __init__(
        self, config: Any, family: Family, tensors: Mapping[str, Any], reference: Callable[[], nn.Module]
    ) -> None:
        """tensors: matrices may be packed. reference: gives transformers' model, for the parts called as they are."""
        self.config = config
        self.family = family
        self.tensors = tensors
        self.reference = reference
        self.embeddings = tensors[f"model.{family.called('embed_tokens')}.weight"]  # [V, E]
        eps = (getattr(config, name, None) for name in EPS)
        self._eps: float = next((value for value in eps if value is not None), DEFAULT_EPS)
        self.called = list[str]()  # modules of the reference
        self._is_quantised = getattr(config, "quantization_config", None) is not None

    def module(self, name: str) -> Any:
        """A module of the reference, which is called as it is."""
        self.called.append(name)
        return self.reference().get_submodule(name)

    def linear(self, name: str) -> Function:
        """A linear layer; one whose weights transformers has quantised is the module itself."""
        if self._is_quantised and type(module := self.module(name)) is not nn.Linear:
            return cast(Function, module)
        return self.scaled(Linear(self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")), name)

    def scaled(self, function: Function, name: str) -> Function:
        """What a module of this name gives, by the family's scale of it."""
        factor = setting_of(self.config, self.family.scales.get(name.rpartition(".")[2]))
        return function if factor is None else lambda x: function(x) * factor

    def norm(self, name: str, eps: float | None = None, is_plain: bool = False) -> Norm:
        """eps: in place of the configuration's. is_plain: of the family's plain form, if it has one."""
        weight, bias = (self.tensors.get(f"{name}.{part}") for part in ("weight", "bias"))
        form = self.family.norm
        eps = self._eps if eps is None else eps
        form = self.family.plain_norm or form if is_plain else form
        if form == "rms or layer":  # by the epsilon that the configuration has
            form = RMS if getattr(self.config, "rms_norm_eps", None) else "layer, wide"
        if isinstance(form, NormForm):
            weight = self.tensors[f"{name}.weight"]
            return Norm(partial(form.normed, weight=weight, eps=eps), weight, eps, form)
        if form == "rms by power":
            return Norm(partial(_rms_by_power, weight=weight, eps=eps))
        if weight is None:  # OLMo 1
            return Norm(lambda x: F.layer_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype))
        if form == "layer, wide":
            return Norm(partial(_wide_layer_norm, weight=weight, eps=eps))
        weight = weight + 1.0 if form == "layer, plus one" else weight
        return Norm(lambda x: F.layer_norm(x, weight.shape, weight, bias, eps))

    def gate(self, name: str) -> Function:
        """x [S, E] -> factors of attention's output, [S, H] or [S, H * D]. name: with a Gate at its end."""
        name, _, by = name.partition(" by ")
        made = self.half(name, 1) if name.endswith("q_proj") else self.linear(name)
        activation = _softplus if by else torch.sigmoid
        return lambda x: activation(made(x))

    def half(self, name: str, which: int) -> Linear:
        """Return half of a linear layer that gives each head's queries and then its gate: the rows of one of the two."""
        whole = self.linear(name)
        if not isinstance(whole, Linear) or isinstance(whole.weight, PackedMatrix):
            raise ModelUnsupported(
                "its weights are quantised, and its queries and gates are cut out of them: use a checkpoint in bf16",
                setting="model.name",
            )
        n = self.config.num_attention_heads
        parts = (whole.weight, whole.bias)
        halves = (p if p is None else p.view(n, 2, -1, *p.shape[1:])[:, which] for p in parts)
        weight, bias = (p if p is None else p.reshape(-1, *p.shape[2:]) for p in halves)
        assert weight is not None
        return Linear(weight, bias)

    def mixer(self, name: str) -> RecurrentMixer:
        """The mixer of a recurrent layer."""
        with torch.inference_mode():
            return RecurrentMixer(self.module(name), self.family.matrix_state, self.embeddings[:1])

    def mlp(self, name: str) -> Function:
        """x [S, E] -> [S, E]"""
        family = self.family
        if family.experts:  # each family has a router of its own
            has_experts = not family.experts_if or getattr(self.config, family.experts_if)
            names = [name] if has_experts else []
            if family.shared_mlp and self.config.shared_intermediate_size:
                names.append(f"{name.rpartition('.')[0]}.{family.shared_mlp}")
            return partial(_experts, [self.module(each) for each in names])
        *inner, down = (self.linear(f"{name}.{part}") for part in self.family.mlp_layers)
        is_gated = len(inner) == 2 or self.family.mlp_layers[0] == "gate_up_proj"
        return MLP(tuple(inner), down, self._activation(name), is_gated)

    def latent(self, name: str) -> LatentAttention:
        """The projections of a layer with multi-head latent attention."""
        return LatentAttention(self, name)

    def experts_beside(self, name: str) -> Function | None:
        """hidden before the MLP's norm [S, E] -> what a layer's experts add to the MLP's output, if it has some."""
        if not (self.family.experts_beside and self.config.enable_moe_block):
            return None
        router = self.module(f"{name}.router")
        experts = self.module(f"{name}.experts")
        before, after = (self.norm(f"{name}.{part}_feedforward_layernorm_2") for part in ("pre", "post"))

        def run(hidden: Tensor) -> Tensor:
            _, weights, index = router(hidden)
            return call_norm(after, experts(call_norm(before, hidden)[1], index, weights))[1]

        return run

    def layer_input(self, name: str) -> tuple[Function, Function, Norm, Activation] | None:
        """The gate, projection, norm and activation of a layer's own embedding, if it has one."""
        if not (self.family.layer_inputs and self.config.hidden_size_per_layer_input):
            return None
        gate, projection = (self.linear(f"{name}.per_layer_{part}") for part in ("input_gate", "projection"))
        return gate, projection, self.norm(f"{name}.post_per_layer_input_norm"), self._activation(name)

    def _activation(self, name: str) -> Activation:
        called = getattr(self.config, "hidden_activation", None) or getattr(self.config, "hidden_act", "silu")
        if called in ACTIVATIONS:
            return ACTIVATIONS[called]
        if called == "xielu":  # which has weights
            return cast(Activation, self.module(f"{name}.act_fn"))
        from transformers.activations import ACT2FN  # seconds to import

        return cast(Activation, ACT2FN[called])


def _experts(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The sum of what these give for x [S, E]; some return the router's scores, too."""
    made = [out[0] if isinstance(out, tuple) else out for out in (module(x[None]) for module in modules)]
    return cast(Tensor, sum(made[1:], made[0])[0])


def _rms_by_power(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm in fp32, rounded once, as Gemma 4 has it: by a power, whose bits are not those of a root."""
    wide = x.float()
    wide = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def _wide_layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Layer norm without a bias, in fp32, rounded once. weight [E], or [heads, D] for x [S, heads, D]."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * wide).to(x.dtype)


def call_norm(norm: Norm | None, x: Tensor, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + add [S, E] (without `add`, x itself), and that normed; None norms nothing."""
    if norm is None:
        total = x if add is None else x + add
        return total, total
    return add_norm(x, add, norm)


def norm_heads(norm: Norm, x: Tensor) -> Tensor:
    """x [S, heads, D], each head normed alone."""
    if norm.form is None:  # it may have weights for each head
        return norm.own(x)
    return call_norm(norm, x.reshape(-1, x.shape[-1]))[1].view(x.shape)


class LayerEmbeddings:
    """Each layer's own embeddings of a prompt's tokens (Gemma 4): of the token, and projected from the model's."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        dtype = parts.embeddings.dtype
        self._n_layers = config.num_hidden_layers
        self._width = config.hidden_size_per_layer_input
        self._table = parts.tensors["model.embed_tokens_per_layer.weight"]  # [V, L * I]
        self._project = parts.linear("model.per_layer_model_projection")
        self._norm = parts.norm("model.per_layer_projection_norm")
        self._scale = float(torch.tensor(self._width**0.5, dtype=dtype))
        self._projection_scale = config.hidden_size**-0.5

    @classmethod
    def of(cls, parts: Parts) -> LayerEmbeddings | None:
        """None for a model without any."""
        has_some = parts.family.layer_inputs and parts.config.hidden_size_per_layer_input
        return cls(parts) if has_some else None

    def __call__(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Token ids [S] and their embeddings [S, E] -> [S, L, I]"""
        shape = len(ids), self._n_layers, self._width
        of_token = (F.embedding(ids, self._table) * self._scale).view(shape)
        projected = norm_heads(self._norm, (self._project(hidden) * self._projection_scale).view(shape))
        made: Tensor = (projected + of_token) * 2.0**-0.5
        return made


class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads share what is stored.

    stored of a token: a key, the part with RoPE [R], and a value, the latent c [C] that holds all heads' keys and values.
    A head's key is [W_k c | key], its value W_v c. W_k and W_v are absorbed: queries are W_k^T q, the latents are
    attended to, and W_v is applied to what comes out. So every token is stored once, whatever the number of heads.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        config = parts.config
        linear = parts.linear
        self._n_heads = config.num_attention_heads
        self._plain = config.qk_nope_head_dim
        self._rope = config.qk_rope_head_dim
        self._compress: tuple[Function, Norm] | None = None
        if config.q_lora_rank:
            self._compress = linear(f"{name}.q_a_proj"), parts.norm(f"{name}.q_a_layernorm", LATENT_EPS)
        self._query = linear(f"{name}.{'q_b_proj' if config.q_lora_rank else 'q_proj'}")
        self._down = linear(f"{name}.kv_a_proj_with_mqa")
        self._norm = parts.norm(f"{name}.kv_a_layernorm", LATENT_EPS)
        if not isinstance(linear(f"{name}.kv_b_proj"), Linear):
            raise ModelUnsupported(
                "its weights are quantised, and latent attention needs those of kv_b_proj themselves: use a checkpoint "
                "in bf16",
                setting="model.name",
            )
        up = parts.tensors[f"{name}.kv_b_proj.weight"].view(self._n_heads, -1, config.kv_lora_rank)
        self._key_up = up[:, : self._plain]
        self._value_up = up[:, self._plain :]  # [H, D, C]
        self._order: Tensor | None = None  # from neighbours to halves
        if getattr(config, "rope_interleave", False):
            self._order = torch.arange(self._rope, device=up.device).view(-1, 2).mT.flatten()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed rows [S, E] -> queries [S, H, C + R], keys [S, 1, R] and values [S, 1, C], before RoPE."""
        q = x
        if self._compress:
            down, norm = self._compress
            q = call_norm(norm, down(x))[1]
        by_head = self._query(q).view(len(x), self._n_heads, -1)
        plain, turned = torch.split(by_head, [self._plain, self._rope], dim=-1)
        latent, key = torch.split(self._down(x), [self._key_up.shape[-1], self._rope], dim=-1)
        if self._order is not None:
            turned, key = turned[..., self._order], key[..., self._order]
        absorbed = torch.einsum("shd,hdc->shc", plain, self._key_up)
        return torch.cat([absorbed, turned], dim=-1), key[:, None], call_norm(self._norm, latent)[1][:, None]

    def output(self, attended: Tensor) -> Tensor:
        """What rows take from the latents [S, H * C] -> of the values [S, H * D]."""
        of_heads = attended.view(len(attended), self._n_heads, -1)
        return torch.einsum("shc,hdc->shd", of_heads, self._value_up).flatten(1)
