"""A sentence-transformers folder: is its model a BERT that bert.py computes as the library does? And its parts.

Only what is known to be plain is served; anything else, and any file that is not as expected, is the library's.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

WEIGHTS = "model.safetensors"
MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}  # as older versions wrote it
BERT = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
# Of tokenizer.json's normalizer and of tokenizer_config.json, with the latter's default.
NORMALIZER = {
    "lowercase": ("do_lower_case", True),
    "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}


def is_plain_bert(folder: Path) -> bool:
    """Whether bert.py serves the folder's model."""
    try:
        about = BertFolder(folder)
        return about.has_plain_modules and about.has_plain_weights and about.has_plain_tokenizer
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return False


class BertFolder:
    """What the folder says. Raises OSError, ValueError or LookupError where it says nothing, or something else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = self._json("config.json")
        self._sentence = self._json("sentence_bert_config.json")
        self._tokens = self._json("tokenizer_config.json")

    @property
    def has_plain_modules(self) -> bool:
        """A transformer and a pooling, and no prompts."""
        kinds = [module["type"].rpartition(".")[2] for module in self._json("modules.json")]
        prompts = self._json("config_sentence_transformers.json").get("prompts") or {}
        return kinds in MODULES and not any(prompts.values()) and self.pooling in POOLING.values()

    @property
    def has_plain_weights(self) -> bool:
        plain = all(self.config.get(name, value) == value for name, value in BERT.items())
        return plain and (self._folder / WEIGHTS).is_file()

    @property
    def has_plain_tokenizer(self) -> bool:
        """A tokenizer.json whose settings are the ones that transformers would make it anew with, and a limit."""
        normalizer = self._json("tokenizer.json")["normalizer"]
        same = all(normalizer[ours] == self._tokens.get(*theirs) for ours, theirs in NORMALIZER.items())
        known = normalizer["type"] == "BertNormalizer" and not self._sentence.get("do_lower_case")
        return same and known and self.max_tokens > 0

    @cached_property
    def pooling(self) -> str:
        """mean, cls, or another name for whatever else."""
        settings = self._json(self._json("modules.json")[1]["path"] + "/config.json")
        old = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on]
        return str(settings.get("pooling_mode") or " ".join(POOLING.get(name, name) for name in old))

    @property
    def max_tokens(self) -> int:
        """Of what the model reads, special tokens included."""
        limit = int(self._sentence.get("max_seq_length") or self._tokens["model_max_length"])
        return min(limit, int(self.config["max_position_embeddings"]))

    def tokenizer(self) -> Tokenizer:
        """Without truncation and padding."""
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def weights(self) -> dict[str, Tensor]:
        """By name, without the prefix of a model that was saved as a part of another; mapped, not read yet."""
        return {
            name.removeprefix("bert."): weight for name, weight in load_file(self._folder / WEIGHTS).items()
        }

    def _json(self, name: str) -> Any:
        return json.loads((self._folder / name).read_text(encoding="utf-8"))
