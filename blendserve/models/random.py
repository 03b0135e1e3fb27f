"""Models of random weights, `random:SHAPE`, for measuring speed: it depends on sizes, not on what was learned.

A shape is a published architecture's name or a folder with a config.json. The same configuration, dtype and seed give
the same weights, in seconds for any size.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from blendserve.errors import ModelError
from blendserve.models.attention_forms import layer_settings
from blendserve.models.refusals import check_supported

RANDOM = "random:"
TILE = 4_194_301  # numbers that are drawn and then repeated; a prime, so that the rows of a matrix differ
STD = 0.02  # of the weights, as most families are initialised
SIZES = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
ROPE_1M = {"rope_type": "default", "rope_theta": 1e6}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TIED, QWEN = {"tie_word_embeddings": True}, {"rope_parameters": ROPE_1M, "rms_norm_eps": 1e-6}
# The values of SIZES, the longest prompt, and further settings.
SHAPES: dict[str, tuple[tuple[str | int, ...], int, dict[str, Any]]] = {
    "Qwen2.5-0.5B": (("qwen2", 24, 896, 4864, 14, 2, 151_936), 32_768, {**QWEN, **TIED}),
    "Qwen2.5-7B": (("qwen2", 28, 3584, 18_944, 28, 4, 152_064), 32_768, QWEN),
    "Llama-3.2-1B": (
        ("llama", 16, 2048, 8192, 32, 8, 128_256),
        131_072,
        {"rope_parameters": {**LLAMA_3, "factor": 32.0}, "rms_norm_eps": 1e-5, **TIED},
    ),
    "Llama-3.1-8B": (
        ("llama", 32, 4096, 14_336, 32, 8, 128_256),
        131_072,
        {"rope_parameters": {**LLAMA_3, "factor": 8.0}, "rms_norm_eps": 1e-5},
    ),
    "Mistral-7B": (  # v0.3
        ("mistral", 32, 4096, 14_336, 32, 8, 32_768),
        32_768,
        {"rope_parameters": ROPE_1M, "rms_norm_eps": 1e-5, "sliding_window": None},
    ),
}


def shape_config(name: str) -> Any:
    """The Hugging Face configuration of a named shape, or of a folder's config.json.

    Raises ModelError for a name that is neither, or numbers that fit no model; ModelUnsupported.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    shape = next((shape for called, shape in SHAPES.items() if called.lower() == name.lower()), None)
    file = Path(name) / "config.json"
    if not shape and not file.is_file():
        raise ModelError(
            f"there is no shape {name!r}: give {RANDOM} with one of {', '.join(SHAPES)}, or with a folder that has "
            "a config.json"
        )
    try:
        if shape:
            sizes, context, more = shape
            settings: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
            head_dim = settings["hidden_size"] // settings["num_attention_heads"]
            defaults = {
                "head_dim": head_dim,
                "max_position_embeddings": context,
                "tie_word_embeddings": False,
            }
            config = AutoConfig.for_model(**{**settings, **defaults, **more})
        else:
            config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"the shape in {file} cannot be used: {' '.join(str(error).split())}") from None
    check_supported(config)
    config = config.get_text_config()
    first = layer_settings(config, 0)
    for size in SIZES[1:]:
        if getattr(first, size, 1) < 1:
            raise ModelError(f"shape {name!r} has {size} {getattr(first, size)}: it must be at least 1")
    if first.num_attention_heads % first.num_key_value_heads:
        raise ModelError(
            f"shape {name!r} has {first.num_attention_heads} query heads, which {first.num_key_value_heads} kv heads "
            "cannot share evenly"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"shape {name!r} is of type {config.model_type}, which transformers has as a part of vision checkpoints "
            "alone: give a shape of a text model"
        )
    return config


@torch.no_grad()
def random_model(config: Any, dtype: torch.dtype, seed: int = 0, device: torch.device | None = None) -> Any:
    """transformers' model of this configuration. Norms scale by one; all else is normal noise of deviation STD.

    Made on the device itself: gigabytes of weights need not travel there.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    device = device or torch.device("cpu")
    model_class: Any = AutoModelForCausalLM
    with no_init_weights(), device:
        model = model_class.from_config(config, dtype=dtype)
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    tile = torch.randn(TILE, generator=generator).mul_(STD).to(dtype).repeat(2).to(device)
    for name, weights in model.named_parameters():  # tied ones once
        if weights.dim() == 1 and name.endswith("weight"):
            weights.fill_(1.0)
            continue
        start = int(torch.randint(TILE, (), generator=generator))
        for part in weights.view(-1).split(TILE):
            part.copy_(tile[start : start + len(part)])
    return model


class ModuloTokenizer:
    """A tokenizer with each id modulo a smaller vocabulary: as much work as its own, other tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._size = vocab_size
        self.eos_token_id = tokenizer.eos_token_id % vocab_size

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        encoded = self._tokenizer(text, **options)
        return {**encoded, "input_ids": [i % self._size for i in encoded["input_ids"]]}

    def __deepcopy__(self, memo: Any) -> ModuloTokenizer:
        return ModuloTokenizer(copy.deepcopy(self._tokenizer, memo), self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
