"""Every family against its own `model.forward`, step by step; every other model refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blendserve.core import TokenIds
from blendserve.errors import ModelUnsupported
from blendserve.kernels.ops import attend
from blendserve.kernels.rows import plan_rows
from blendserve.models.adapter import Adapter
from blendserve.models.families import FAMILIES, REFUSED, Family, check_supported
from blendserve.models.text_tower import TextTower
from tests.support.blending import assert_near, distance, model_says, some_ids
from tests.support.models import (
    CONTEXT,
    PIXTRAL,
    TINY,
    TYPED_ROPE,
    TYPES,
    config,
    rope,
    tiny_adapter,
    tiny_model,
    tower,
)

IDS = some_ids(40)


@torch.inference_mode()
def dense(adapter: Adapter, ids: TokenIds) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Prefill through the adapter's steps: the input of each layer and the last one's output, and all logits."""
    positions = torch.arange(len(ids))
    ropes, states = adapter.rope(positions), [adapter.embed(torch.tensor(ids))]
    for l, spec in enumerate(adapter.specs):
        rows = adapter.project(l, states[-1])
        q, k = adapter.rotate(rows.q, ropes[l]), adapter.rotate(rows.k, ropes[l])
        plan = plan_rows(positions, adapter.group, spec.window)
        states.append(adapter.finish(l, states[-1], attend(q, k, rows.v, spec, plan)))
    return states, adapter.logits(states[-1])


def check_every_layer(adapter: Adapter) -> None:
    said = model_says(adapter, IDS, output_hidden_states=True)
    states, logits = dense(adapter, IDS)
    for own, ours in zip(said.hidden_states[:-1], states[:-1], strict=True):  # the last one is normed
        assert_near(ours, own[0])
    assert_near(logits, said.logits[0])


@pytest.mark.parametrize("name", TINY)
def test_every_layer_is_the_models_own(name: str) -> None:
    check_every_layer(tiny_adapter(name))
    logits = model_says(tiny_adapter(name), IDS).logits[0]
    assert distance(logits[1:], logits[:-1]) > 0.1


def test_every_family_has_a_tiny_model() -> None:
    assert {name.partition("-")[0] for name in TINY} == set(FAMILIES)


def peculiarities() -> list[tuple[str, str]]:
    """(model_type, field) wherever a family's plan is not Llama's."""
    llama = FAMILIES["llama"]
    return [
        (kind, field.name)
        for kind, family in FAMILIES.items()
        for field in dataclasses.fields(Family)
        if field.name not in {"models", "experts"}
        and getattr(family, field.name) != getattr(llama, field.name)
    ]


@pytest.mark.parametrize(("kind", "field"), peculiarities())
def test_each_peculiarity_of_a_family_is_needed(
    kind: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the check above must fail on at least one of the family's tiny models."""
    plain = dataclasses.replace(FAMILIES[kind], **{field: getattr(FAMILIES["llama"], field)})
    monkeypatch.setitem(FAMILIES, kind, plain)
    noticed = []
    for name in TINY:
        if name.partition("-")[0] == kind:
            try:
                check_every_layer(Adapter(tiny_model(name)))
            except (AssertionError, AttributeError, TypeError, RuntimeError, KeyError, ValueError):
                noticed.append(name)
    assert noticed


@pytest.mark.parametrize("name", TINY)
def test_a_mixture_of_experts_is_known_as_one(name: str) -> None:
    """Some such modules take rows without a batch, so that the check above would not notice."""
    model, kind = tiny_model(name), name.partition("-")[0]
    routed = any(part.endswith("experts") for part, _ in model.named_modules() if "shared" not in part)
    assert FAMILIES[kind].experts == routed


@pytest.mark.parametrize("name", TINY)
def test_says_what_the_model_is(name: str) -> None:
    adapter = tiny_adapter(name)
    cache = model_says(adapter, IDS).past_key_values.layers
    assert len(cache) == adapter.n_layers == len(adapter.specs)
    assert cache[0].keys.shape == (1, adapter.n_kv_heads, len(IDS), adapter.head_dim)
    assert adapter.kv_bytes_per_token == sum(2 * x.keys[0, :, 0].numel() * 4 for x in cache)
    scaled = name.startswith("ministral3")  # exact to where it begins to scale queries
    assert (adapter.context_limit, adapter.vocab_size) == (CONTEXT // 2 if scaled else CONTEXT, 97)


def test_a_model_that_scales_queries_is_exact_to_the_first_scaled_one() -> None:
    adapter = tiny_adapter("ministral3")
    ids = some_ids(adapter.context_limit + 2)
    said, ours = model_says(adapter, ids).logits[0], dense(adapter, ids)[1]
    exact = adapter.context_limit
    assert_near(ours[:exact], said[:exact])
    assert distance(ours[exact], said[exact]) > 1e-3


def test_a_text_tower_is_the_checkpoint_s_own_text_model() -> None:
    for name in [name for name in TINY if name.endswith(("-tower", "vl_text", "vl_moe_text"))]:
        torch.manual_seed(0)
        checkpoint: Any = tf.AutoModelForImageTextToText.from_config(
            TINY[name](), attn_implementation="eager"
        )
        ids = torch.tensor([IDS])
        with torch.inference_mode():
            assert_near(TextTower(checkpoint.eval())(input_ids=ids).logits, checkpoint(input_ids=ids).logits)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            lambda: config(tf.LlamaConfig, rope(rope_type="dynamic", factor=2.0)),
            "'llama'.*'dynamic' changes with",
        ),
        (
            lambda: config(tf.Phi3Config, rope(**LONGROPE, original_max_position_embeddings=64)),
            "'phi3'.*'longrope' changes with",
        ),
        (
            lambda: config(
                tf.Gemma3TextConfig,
                layer_types=TYPES,
                rope_parameters={
                    **TYPED_ROPE["rope_parameters"],
                    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                },
            ),
            "'gemma3_text'.*'dynamic' changes with",
        ),
        (lambda: config(tf.Gemma3TextConfig, use_bidirectional_attention=True), "is not causal"),
        (
            lambda: config(tf.Qwen2Config, layer_types=["chunked_attention"] * 4),
            "layers of type chunked_attention",
        ),
        (lambda: tf.DeepseekV3Config(), "'deepseek_v3'.*compressed keys"),
        (lambda: tf.MambaConfig(), "'mamba'.*recurrent"),
        (lambda: tf.JambaConfig(), "'jamba'.*recurrent"),
        (lambda: tf.Qwen3NextConfig(), "'qwen3_next'.*recurrent"),
        (lambda: tf.GPT2Config(), "'gpt2'.*added to the input"),
        (lambda: tf.BloomConfig(), "'bloom'.*ALiBi"),
        (lambda: tf.GptOssConfig(), "'gpt_oss'.*sinks"),
        (lambda: tf.MllamaConfig(), "'mllama'.*text-only"),
        (lambda: tower(tf.Mistral3Config, PIXTRAL, {"model_type": "gpt_oss"}), "'gpt_oss'.*sinks"),
        (lambda: config(tf.OlmoConfig, clip_qkv=8.0), "'olmo'.*clips queries, keys and values"),
        (lambda: config(tf.OlmoeConfig, clip_qkv=8.0), "'olmoe'.*clips queries, keys and values"),
        (lambda: config(tf.StableLmConfig, use_parallel_residual=True), "'stablelm'.*read the same input"),
        (lambda: config(tf.StableLmConfig, qk_layernorm=True), "'stablelm'.*a norm of its own"),
        (
            lambda: config(
                tf.PhimoeConfig,
                rope(**LONGROPE, original_max_position_embeddings=64, short_mscale=1.1, long_mscale=1.2),
            ),
            "'phimoe'.*'longrope' changes with",
        ),
        (lambda: tf.T5Config(), "'t5'.*not causal"),
        (lambda: tf.PegasusConfig(), "'pegasus'.*not causal"),  # known by its settings alone
        (lambda: tf.PersimmonConfig(), "'persimmon'.*is not proven.*Supported are apertus, arcee"),
    ],
)
def test_what_cannot_be_blended_is_refused_by_name(made: Any, reason: str) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        check_supported(made())


def test_refused_names_are_real_and_not_supported_too() -> None:
    assert set(REFUSED) - set(CONFIG_MAPPING) == set()
    assert not set(REFUSED) & set(FAMILIES)
    assert set(FAMILIES) <= set(CONFIG_MAPPING)


def test_a_setting_that_a_family_does_not_know_changes_nothing() -> None:
    """A Llama whose configuration speaks of a window has none in transformers either."""
    made = config(tf.LlamaConfig, sliding_window=4)
    torch.manual_seed(0)
    model: Any = tf.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    check_every_layer(Adapter(model))
