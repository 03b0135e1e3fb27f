"""The tokenizer of a GGUF file, without transformers: byte-level BPE, or SentencePiece's BPE with bytes as fallback."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from blendserve.errors import ModelUnsupported
from blendserve.models.gguf import Gguf
from blendserve.models.pre_tokenizers import WHOLE_TOKENS, set_pre_tokenizer
from blendserve.models.tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # token types
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours -> the file's
SPACE = "\u2581"


def token_ids(metadata: dict[str, Any], *names: str) -> frozenset[int]:
    """The ids of tokens by what they are for, as far as the file has them."""
    found = (metadata.get(f"tokenizer.ggml.{NAMES.get(name, name)}_token_id") for name in names)
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    return frozenset(i for i in found if isinstance(i, int) and i < n_tokens)


def read_tokenizer(gguf: Gguf, architecture: str) -> Tokenizer:
    """Raises ModelUnsupported for a kind that is not read; any error for damaged metadata."""
    metadata = gguf.metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {f"{name}_token": tokens[i] for name in NAMES for i in token_ids(metadata, name)}
    if kind == "gpt2":
        backend = _byte_level(metadata)
        set_pre_tokenizer(backend, metadata.get("tokenizer.ggml.pre"), gguf.path)
    elif kind == "llama":
        backend = _sentence_piece(metadata, architecture, special.get("unk_token"))
    else:
        raise ModelUnsupported(f"{gguf.path} has a tokenizer {kind!r}, which is not read", path=gguf.path)
    _add_special(backend, metadata, special)
    by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in WHOLE_TOKENS  # as in llama.cpp
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", by_default)
    _set_ends(backend, special.get("bos_token") if adds_bos else None)
    (eos,) = token_ids(metadata, "eos") or {None}
    if eos is None and "tokenizer.ggml.eos_token_id" in metadata:
        raise ValueError("its end token is not in its vocabulary")
    return Tokenizer(backend, special, eos, metadata.get("tokenizer.chat_template"))


def _byte_level(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])},
            merges=[_pair(merge) for merge in metadata["tokenizer.ggml.merges"]],
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _sentence_piece(metadata: dict[str, Any], architecture: str, unknown: str | None) -> tokenizers.Tokenizer:
    """Gemma, Phi-3 and all others differ in how spaces are written."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    is_gemma = architecture.startswith("gemma")
    if is_gemma:  # its order is that of the tokens, and tokens of spaces are written as such
        tokens = [SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
        scores = range(0, -len(tokens), -1)
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", ())] or _merges(tokens, scores)
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        unk_token=unknown if is_gemma else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(bpe)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    adds_space = not is_gemma and metadata.get("tokenizer.ggml.add_space_prefix", True)
    if is_gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif architecture == "phi3" and adds_space:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE, "first" if adds_space else "never", split=False
        )
    parts += [decoders.Strip(" ", 1)] if adds_space else []
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges(tokens: list[str], scores: Any) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies: of each token into two others, the best token first."""
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = [(token[:n], token[n:]) for n in range(1, len(token))]
        pairs = [(ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids]
        found += [(score, len(a), len(b), a, b) for _, _, a, b in sorted(pairs)]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(a, b) for *_, a, b in found]


def _add_special(backend: Any, metadata: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that are found in a text as they are."""
    types = list(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    control = [token for token, kind in types if kind == CONTROL]
    named = dict.fromkeys([*special.values(), *control])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in named])
    own = [token for token, kind in types if kind == USER_DEFINED and token not in named]
    # Gemma's spaces are written otherwise
    own = [token for token in own if backend.token_to_id(token) is not None]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _set_ends(backend: Any, bos: str | None) -> None:
    """What is added to a text."""
    first, second = (f"{bos}:{n} " if bos else "" for n in (0, 1))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}$A:0",
        pair=f"{first}$A:0 {second}$B:1",
        special_tokens=[(bos, backend.token_to_id(bos))] if bos else [],
    )
