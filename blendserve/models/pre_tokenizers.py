r"""How a GGUF file's text is cut before byte-level BPE: by the name in `tokenizer.ggml.pre`, as in llama.cpp.

A GGUF file has merges, which were learnt on text that was cut by regular expressions, and the name of these. Cut in
another way, numbers and blank lines become tokens that the model has not seen in training.

The names are those of llama.cpp (src/llama-vocab.cpp), the expressions those of the models' own tokenizer.json. Each cuts
what the one before it has left whole: its matches and what is between them are pieces.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import Regex, pre_tokenizers

log = logging.getLogger(__name__)

DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # 's and its like
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
HAN_OR_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """Words with one sign before them, numbers, and signs with the line ends behind them."""
    others = rf"[^\s{letters}\p{{N}}]"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return rf"{SHORT}|{word}|{digits}| ?{others}+[\r\n]*|{BLANKS}"


def _cased(digits: str, short: str = "") -> str:
    """Cut as `_words` does, and before a capital letter inside a word. short: what may end a word."""
    start = r"[^\r\n\p{L}\p{N}]?"
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = rf"{start}{upper}*{lower}+{short}|{start}{upper}+{lower}*{short}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"


LLAMA_3 = _words(THREE_DIGITS)
QWEN_2 = _words(DIGIT)
GPT_4O = _cased(THREE_DIGITS, f"{SHORT}?")
MARKS = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
SIGN_AND_LETTERS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK_3 = (THREE_DIGITS, HAN_OR_KANA, f"{SIGN_AND_LETTERS}|{MARKS}|{BLANKS}")
GROUPED_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"

EXPRESSIONS: dict[tuple[str, ...], str] = {  # -> the names that have them
    (GPT_2,): (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 a.x-4.0 mellum gigachat modern-bert roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code"
    ),
    (DIGIT, GPT_2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (LLAMA_3,): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 chatglm-bpe"
    ),
    (QWEN_2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (_words(DIGIT, r"\p{L}\p{M}"),): "qwen35",
    (GPT_4O,): "gpt-4o llama4 kanana2 talkie minimax-m2",
    (_cased(DIGIT),): "tekken",
    (GROUPED_DIGITS, GPT_4O): "tiny_aya cohere2moe",
    (THREE_DIGITS, _words(r"\p{N}+")): "minicpm5",
    (r"[^\n]+|[\n]+", QWEN_2): "laguna",
    DEEPSEEK_3: "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    # The first class is of cased letters.
    (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        *(r"\s+$", CJK, r"\p{N}+"),
    ): "deepseek-llm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT): "deepseek-coder",
    (r"[\p{P}$+<=>^~|`]+", GPT_2, "[0-9][0-9][0-9]"): "falcon",
    (r"[\p{P}$+<=>^~|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
}
BY_NAME = {name: cuts for cuts, names in EXPRESSIONS.items() for name in names.split()}
# A piece that is a token stays whole, whatever its merges are.
WHOLE_TOKENS = {
    *(
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
    ),
    *("tekken", "minicpm5"),
}


def set_pre_tokenizer(backend: Any, name: str | None, file: object) -> None:
    """Let a Rust tokenizer with byte-level BPE cut text as its GGUF file says. Warns of a name that is not known.

    name: of the file's `tokenizer.ggml.pre`; None = it has none, which llama.cpp reads as "default".
    """
    if name not in BY_NAME:
        known = (
            "names no pre-tokenizer" if name is None else f"has a pre-tokenizer that is not known, {name!r}"
        )
        log.warning(
            "%s %s: numbers and blank lines may be other tokens than in training. "
            "For correct answers, use the model's Hugging Face folder",
            *(file, known),
        )
        if name is not None:
            return
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in BY_NAME[name or "default"]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if name in WHOLE_TOKENS:
        backend.model.ignore_merges = True
