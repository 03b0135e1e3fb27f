"""Readers' shapes by name, for speed alone: `random:NAME` gives such a reader with random weights.

Numbers are the published architectures'. A shape says how large everything is and nothing about what was learnt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blendserve.errors import ModelError
from blendserve.models.families import check_supported

RANDOM = "random:"


def _llama3_rope(factor: float) -> dict[str, Any]:
    """Llama 3.1's scaling of its 8,192 tokens."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _plain_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _shape(
    kind: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _shape(
        "qwen2", 24, 896, 4864, 14, 2, 151_936,
        max_position_embeddings=32_768, rope_parameters=_plain_rope(1e6), rms_norm_eps=1e-6, tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": _shape(
        "qwen2", 28, 3584, 18_944, 28, 4, 152_064,
        max_position_embeddings=32_768, rope_parameters=_plain_rope(1e6), rms_norm_eps=1e-6, tie_word_embeddings=False,
    ),
    "Llama-3.2-1B": _shape(
        "llama", 16, 2048, 8192, 32, 8, 128_256,
        max_position_embeddings=131_072, rope_parameters=_llama3_rope(32.0), rms_norm_eps=1e-5, tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": _shape(
        "llama", 32, 4096, 14_336, 32, 8, 128_256,
        max_position_embeddings=131_072, rope_parameters=_llama3_rope(8.0), rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "Mistral-7B": _shape(  # v0.3: no sliding window
        "mistral", 32, 4096, 14_336, 32, 8, 32_768,
        max_position_embeddings=32_768, rope_parameters=_plain_rope(1e6), rms_norm_eps=1e-5, tie_word_embeddings=False,
        sliding_window=None,
    ),
}  # fmt: skip


def shape_config(name: str) -> Any:
    """The Hugging Face configuration of a named shape, or of a folder's config.json.

    Raises ModelError for a name that is neither, or numbers that fit no model; ModelUnsupported.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    known = {shape.lower(): shape for shape in SHAPES}
    folder = Path(name)
    try:
        if name.lower() in known:
            settings = dict(SHAPES[known[name.lower()]])
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        elif (folder / "config.json").is_file():
            config = AutoConfig.from_pretrained(folder)
        else:
            raise ModelError(
                f"there is no shape {name!r}: give {RANDOM} with one of {', '.join(SHAPES)}, or with a folder that has "
                "a config.json"
            )
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise ModelError(f"the shape in {folder / 'config.json'} cannot be used: {why}") from None
    check_supported(config)
    config = config.get_text_config()
    _check_numbers(name, config)
    return config


def _check_numbers(name: str, config: Any) -> None:
    """Refuse what could be built, but not run."""
    for number in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ):
        if getattr(config, number) < 1:
            raise ModelError(f"shape {name!r} has {number} {getattr(config, number)}: it must be at least 1")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"shape {name!r} has {config.num_attention_heads} query heads, which {config.num_key_value_heads} kv heads "
            "cannot share evenly"
        )
