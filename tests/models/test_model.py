"""Every family against its own `model.forward`, layer by layer; every other model is refused."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blendserve.core import TokenIds
from blendserve.errors import ModelUnsupported
from blendserve.kernels.ops import attend
from blendserve.kernels.rows import plan_rows
from blendserve.models.families import FAMILIES, Family
from blendserve.models.layers import call_norm, norm_heads
from blendserve.models.model import DecoderModel, Hidden
from blendserve.models.reference import TextTower
from blendserve.models.refusals import REFUSED, check_supported
from tests.support import models as tiny
from tests.support.blending import assert_near, distance, model_says, some_ids
from tests.support.models import (
    CHECKPOINTS,
    FAMILIES_HERE,
    TINY,
    config,
    rope,
    tiny_config,
    tiny_decoder,
    tiny_model,
)

IDS = some_ids(40)
ROOT = Path(__file__).parents[2]


@torch.inference_mode()
def dense(decoder: DecoderModel, ids: TokenIds) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Prefill through the decoder's steps: the input of each layer and the last one's output, and all logits."""
    positions = torch.arange(len(ids))
    ropes, states, kv = decoder.rope(positions), [decoder.embed(torch.tensor(ids))], []
    for l, spec in enumerate(decoder.specs):
        if l in decoder.recurrent:
            mixer = decoder.mixer(l)
            added, _ = mixer.run(decoder.normed(l, states[-1]), mixer.empty)
            states.append(decoder.finish(l, states[-1], added))
            kv.append((torch.empty(0), torch.empty(0)))
            continue
        rows = decoder.project(l, states[-1])
        if decoder.kv_sources[l] == l:
            heads, *dims = decoder.kv_shape(l)
            assert [tuple(x.shape) for x in (rows.k, rows.v)] == [(heads, len(ids), dim) for dim in dims]
        kv.append((decoder.rotate(rows.k, ropes[l]), rows.v))
        q = decoder.rotate_queries(l, rows.q, ropes[l])
        k, v = decoder.attended_kv(l, *kv[decoder.kv_sources[l]])
        plan, q = plan_rows(positions, *decoder.attention_forms[l]), ropes[l].scale_queries(q)
        states.append(decoder.finish(l, states[-1], attend(q, k, v, spec, plan)))
    return [x.x if isinstance(x, Hidden) else x for x in states], decoder.logits(states[-1])


def check_every_layer(decoder: DecoderModel) -> Any:
    said = model_says(decoder, IDS, output_hidden_states=True)
    states, logits = dense(decoder, IDS)
    halves = 1 + decoder.family.side_by_side
    for own, ours in zip(said.hidden_states[:-1], states[:-1:halves], strict=True):  # the last one is normed
        assert_near(ours, own[0], max(1e-4, 1e-5 * float(own[0].abs().max())))
    assert_near(logits, said.logits[0])
    return said


@pytest.mark.parametrize("name", TINY)
def test_every_layer_is_the_models_own(name: str) -> None:
    decoder = tiny_decoder(name)
    said = check_every_layer(decoder)
    assert distance(said.logits[0, 1:], said.logits[0, :-1]) > 0.1
    layers = said.past_key_values.layers
    assert len(layers) == decoder.own_layer(decoder.n_kv_layers - 1) + 1
    assert len(decoder.specs) == decoder.n_layers
    layers = [layers[decoder.own_layer(l)] for l in range(decoder.n_kv_layers) if l not in decoder.recurrent]
    shapes = [(x.keys.shape, x.values.shape) for x in layers]
    if decoder.family.latent:  # transformers' cache has the latents as keys, and the keys as values
        shapes = [(values, keys) for keys, values in shapes]
    kept = [shape for l, shape in enumerate(decoder.kv_shapes) if l not in decoder.recurrent]
    wanted = [[(1, heads, len(IDS), dim) for dim in dims] for heads, *dims in kept]
    assert shapes == [tuple(pair) for pair in wanted]
    sides = (side for x in layers for side in (x.keys, x.values))
    assert decoder.kv_bytes_per_token == sum(side[0, :, 0].numel() * 4 for side in sides)
    assert decoder.context_limit == tiny.CONTEXT
    parts = (part for part, _ in tiny_model(name).named_modules() if "shared" not in part)
    assert decoder.has_experts == any(part.endswith("experts") for part in parts)
    check_norms_and_rotation(tiny_decoder(name, torch.bfloat16))
    check_state_maps(decoder)


@torch.inference_mode()
def check_state_maps(decoder: DecoderModel) -> None:
    """A chunk's map, made behind one state, gives what its tokens give behind any other; the seam's tokens run."""
    for l in decoder.recurrent:
        mixer, seeded = decoder.mixer(l), torch.Generator().manual_seed(l)
        states = []
        for n in (9, 30):  # of other tokens before
            rows = torch.randn(n, decoder.config.hidden_size, generator=seeded)
            states.append(mixer.run(rows, mixer.empty)[1])
        chunk = torch.randn(50, decoder.config.hidden_size, generator=seeded)
        added, made = mixer.run_chunk(chunk, states[0])
        assert [tuple(x.shape[:2]) for x in made] == [(mixer.shape.heads, mixer.n_rows)] * 2
        for state in states:
            out, after = mixer.run(chunk, state)
            if state is states[0]:
                assert_near(added, out)
            head, seam = mixer.run(chunk[: decoder.seam], state)
            assert_near(head, out[: decoder.seam])
            composed = mixer.after(seam, *made)
            assert_near(composed.memory, after.memory)
            assert torch.equal(composed.inputs, after.inputs)
            if after.memory.numel():
                assert distance(mixer.after(state, *made).memory, after.memory) > 1e-3
        # a state in place of a map forgets what stood before
        whole = mixer.after(states[1], *mixer.packed(after))
        assert_near(whole.memory, after.memory)


def own_rotary(decoder: DecoderModel, l: int) -> Any:
    """The model's module that gives the angles of layer l."""
    model: Any = decoder.reference
    if not decoder.family.rope_bases:
        return getattr(model.model, "rotary_emb", None) or model.model.pos_emb  # LFM2-MoE
    base = decoder.config.layer_rope_theta[l]
    return next(x for x in model.model.rotary_embs if x.config.rope_parameters["rope_theta"] == base)


def own_rotation(
    decoder: DecoderModel, l: int, positions: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines [S, R] of layer l's module, and x [heads, S, R] rotated by the model's function."""
    model: Any = decoder.reference
    layer_type = (decoder.config.layer_types[l],) if decoder.family.typed_rope else ()
    angles = own_rotary(decoder, l)(x, positions[None], *layer_type)
    module: Any = sys.modules[type(model.model.layers[decoder.own_layer(l)].self_attn).__module__]
    if isinstance(angles, torch.Tensor):  # DeepSeek V2's are complex numbers
        return angles[0].real.repeat_interleave(2, -1), module.apply_rotary_emb(x[None], x[None], angles)[0][
            0
        ]
    takes_two = "k" in signature(module.apply_rotary_pos_emb).parameters
    given = (x[None], x[None]) if takes_two else (x[None],)
    rotated = module.apply_rotary_pos_emb(*given, *angles)
    return angles[0][0], (rotated[0] if takes_two else rotated)[0]


@torch.inference_mode()
def check_norms_and_rotation(decoder: DecoderModel) -> None:
    """In bf16, where forms of norms and rotation differ by their roundings: every bit is the model's own."""
    model: Any = decoder.reference
    seeded = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(9, decoder.config.hidden_size, generator=seeded).bfloat16()
    positions = torch.arange(9) * 37 + 1
    family, ropes = decoder.family, decoder.rope(positions)
    for l, ours in enumerate(decoder.layers):
        own = model.model.layers[decoder.own_layer(l)]
        places = Family("") if family.llama_norms and l in decoder.recurrent else family
        heads = rows.view(9, -1, decoder.kv_shape(l).dim)
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            called, norm = getattr(places, name), getattr(ours, name)
            if norm is not None:
                assert torch.equal(call_norm(norm, rows)[1], getattr(own, called)(rows))
        if ours.qk_norms and family.qk_norm == "head":
            q, norm = heads[:, : decoder.query_heads[l]], getattr(own.self_attn, family.called("q_norm"))
            assert torch.equal(norm_heads(ours.qk_norms[0], q), norm(q))
        if ropes[l].cos.shape[-1]:
            width = ropes[l].cos.shape[-1]
            turned = heads.transpose(0, 1)[..., :width]
            cos, expected = own_rotation(decoder, l, positions, turned)
            cos = cos.repeat(1, width // cos.shape[-1])  # gpt-oss has each angle once
            # its complex numbers have other last bits
            bound = 0.02 if "v2" in decoder.config.model_type else 0.0
            for mine, theirs in ((ropes[l].cos, cos), (decoder.rotate(turned, ropes[l]), expected)):
                assert distance(mine, theirs) <= bound
    assert torch.equal(
        call_norm(decoder.norm, rows)[1], getattr(model.model, decoder.family.called("norm"))(rows)
    )


# What a family that is described wrongly may end with.
ALL_ERRORS = (
    AssertionError,
    AttributeError,
    TypeError,
    RuntimeError,
    LookupError,
    ValueError,
    ModelUnsupported,
)


def without(family: Family) -> Iterator[tuple[str, Family]]:
    """A family with one field of Llama's in place of its own, or without one entry of a field, by the name of that."""
    llama = FAMILIES["llama"]
    for name in (field.name for field in dataclasses.fields(Family)):
        own, plain = getattr(family, name), getattr(llama, name)
        if name in {"models", "experts"} or own == plain:
            continue
        if not isinstance(own, Mapping):
            yield name, dataclasses.replace(family, **{name: plain})
            continue
        for key in own:
            others: Any = {other: value for other, value in own.items() if other != key}
            yield f"{name} {key}", dataclasses.replace(family, **{name: others})


PECULIARITIES = [
    pytest.param(kind, plain, id=f"{kind} {name}")
    for kind, family in FAMILIES.items()
    if kind in FAMILIES_HERE
    for name, plain in without(family)
]


@pytest.mark.parametrize(("kind", "plain"), PECULIARITIES)
def test_each_peculiarity_of_a_family_is_needed(
    kind: str, plain: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the checks above fail on at least one of the family's tiny models."""
    monkeypatch.setitem(FAMILIES, kind, plain)
    noticed = []
    for name in TINY:
        if name.partition("-")[0] == kind:
            try:
                check_every_layer(DecoderModel.of(tiny_model(name)))
                check_norms_and_rotation(DecoderModel.of(tiny_model(name, torch.bfloat16)))
                check_state_maps(DecoderModel.of(tiny_model(name)))
            except ALL_ERRORS:
                noticed.append(name)
    assert noticed


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_text_tower_is_the_checkpoint_s_own_text_model(name: str) -> None:
    checkpoint, ids = tiny.from_config(tiny_config(name)), torch.tensor([IDS])
    with torch.inference_mode():
        assert_near(TextTower(checkpoint)(input_ids=ids).logits, checkpoint(input_ids=ids).logits)


def test_a_setting_that_a_family_does_not_know_changes_nothing() -> None:
    """A Llama whose configuration names a window has none in transformers either."""
    check_every_layer(DecoderModel.of(tiny.from_config(config("llama", sliding_window=4))))


DYNAMIC, SHORT = rope("dynamic", factor=2.0), {"original_max_position_embeddings": 64}
LONGROPE = rope("longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, factor=2.0, **SHORT)
FACTORS = {"short_mscale": 1.1, "long_mscale": 1.2}
BOTH = {**tiny.TYPED_ROPE["rope_parameters"], "full_attention": DYNAMIC["rope_parameters"]}
NO_DECODERS = "deepseek_v32 mamba jamba zamba2 gpt2 bloom gemma3n_text mllama t5 pegasus persimmon"
REFUSED_BY = [
    ("rope_parameters", config("llama", **DYNAMIC)),
    ("rope_parameters", config("phi3", **LONGROPE)),
    ("rope_parameters", config("phimoe", rope_parameters={**LONGROPE["rope_parameters"], **FACTORS})),
    ("rope_parameters", config("gemma3_text", rope_parameters=BOTH, layer_types=tiny.TYPES)),
    ("use_bidirectional_attention", config("gemma3_text", use_bidirectional_attention=True)),
    ("layer_types", config("qwen2", layer_types=["chunked_attention"] * 4)),
    *(("clip_qkv", config(kind, clip_qkv=8.0)) for kind in ("olmo", "olmoe")),
    ("use_parallel_residual", config("stablelm", use_parallel_residual=True)),
    *(("qk_layernorm", config(kind, qk_layernorm=True)) for kind in ("stablelm", "phi")),
    ("use_post_norm", config("hyperclovax", use_post_norm=False)),
    *(("model_type", AutoConfig.for_model(kind)) for kind in NO_DECODERS.split()),
    ("model_type", tiny.tower("mistral3", tiny.PIXTRAL, "gpt2")),
]


@pytest.mark.parametrize(("setting", "made"), REFUSED_BY)
def test_models_that_cannot_be_blended_are_refused_by_the_setting(setting: str, made: Any) -> None:
    with pytest.raises(ModelUnsupported) as error:
        check_supported(made)
    assert error.value.setting == setting


def test_latent_attention_over_quantised_weights_is_refused() -> None:
    """Its up-projection is read as a matrix, and those of quantised checkpoints are scaled elsewhere."""

    class Scaled(torch.nn.Linear):
        pass

    model = tiny.tiny_model.__wrapped__("youtu")
    model.config.quantization_config = {"quant_method": "toy"}
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Scaled
    with pytest.raises(ModelUnsupported) as error:
        DecoderModel.of(model)
    assert error.value.setting == "model.name"


def test_every_family_has_a_tiny_model_and_refused_names_are_real_and_no_family() -> None:
    assert {name.partition("-")[0] for name in TINY} == FAMILIES_HERE
    assert set(REFUSED) - set(CONFIG_MAPPING) == set()
    assert not set(REFUSED) & set(FAMILIES)


def test_the_page_of_families_is_printed_from_the_table() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "families_table.py"))["page"]()
    told = "run scripts/families_table.py"
    assert (ROOT / "docs" / "reference" / "models.md").read_text() == page, told
