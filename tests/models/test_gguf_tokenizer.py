"""Tokenizers of GGUF files, against transformers' conversion of the same file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from blendserve.models.gguf_model import read_gguf
from blendserve.models.pre_tokenizers import set_pre_tokenizer
from blendserve.models.sources import BUNDLED
from blendserve.models.tokenizer import Tokenizer
from tests.support.gguf_files import tiny, write_model

pytest.importorskip("gguf", reason="the reference is the package gguf")
pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")

TEXTS = [
    *("", " ", "The  cat sat on 12345 mats.\n\n   It's", "a  b\tc\r\n ", "cab  cab", "  cab"),
    *(
        "na\u00efve \u6f22\u5b57\u304b\u306a \U0001f642",
        "\u041f\u0440\u0438\u0432\u0435\u0442 \u05e9\u05dc\u05d5\u05dd",
    ),
    *(
        "\u0639\u0627\u0644\u0645 \u0928\u092e\u0938\u094d\u0924\u0947 \uc548\ub155",
        "def f(x):\n    return x**2",
    ),
    *("<0>cab<1> <mark> cab<2>", "cab<start_of_turn>user\ncab<|im_end|>"),
]
BYTES = [f"<0x{n:02X}>" for n in range(256)]
WORDS = ["\u2581", *"abc", "\u2581a", "ab", "ca", "cab", "\u2581cab"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def check_equal(ours: Tokenizer, theirs: Any) -> None:
    own = Tokenizer.of(theirs)
    for text in TEXTS:
        for add in (False, True):
            for plain in (False, True):
                ids = ours(text, add, plain)["input_ids"]
                assert ids == own(text, add, plain)["input_ids"], text
                assert ours.decode(ids) == own.decode(ids)
    # transformers adds what its class has
    assert ours.get_vocab().items() <= own.get_vocab().items()
    assert ours.special_tokens.items() <= own.special_tokens.items()
    assert (ours.eos_token_id, ours.chat_template) == (theirs.eos_token_id, theirs.chat_template)


def read_both(file: Path) -> tuple[Tokenizer, Any]:
    start, _ = read_gguf(file)
    return start.tokenizer, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.parametrize("arch", ["llama", "phi3", "gemma2"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_sentence_piece_gives_the_ids_of_transformers(arch: str, adds_bos: bool, tmp_path: Path) -> None:
    spaces = "  " if arch == "gemma2" else "\u2581\u2581"
    tokens = ["<0>", "<1>", "<2>", *BYTES, *WORDS, spaces, "<mark>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 260), USER_DEFINED]
    model = tiny(arch, vocab_size=len(tokens))
    vocabulary = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [-float(n) for n in range(len(tokens))],
        "tokenizer.ggml.add_bos_token": adds_bos,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    ours, theirs = read_both(
        write_model(tmp_path / "tiny.gguf", model, arch, tokens=(tokens, types), more=vocabulary)
    )
    check_equal(ours, theirs)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_byte_level_gives_the_ids_of_transformers(adds_bos: bool, tmp_path: Path) -> None:
    more = {"tokenizer.ggml.add_bos_token": adds_bos}
    ours, theirs = read_both(write_model(tmp_path / "tiny.gguf", tiny("qwen2"), "qwen2", more=more))
    set_pre_tokenizer(theirs.backend_tokenizer, "gpt-2", "the file")
    check_equal(ours, theirs)


def test_a_file_that_says_nothing_of_bos_has_it_as_in_llama_cpp(tmp_path: Path) -> None:
    for pre, first in (("llama-bpe", 1), ("qwen2", None)):
        more = {"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": pre}
        start, _ = read_gguf(write_model(tmp_path / "tiny.gguf", tiny("qwen2"), "qwen2", more=more))
        (found,) = start.tokenizer("b")["input_ids"][:-1] or (None,)
        assert found == first


@pytest.mark.nightly  # transformers takes a minute
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_bundled_files_give_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    about, file = BUNDLED[name], tmp_path / "whole.gguf"
    specs = [find_spec(package) for package in about.packages]
    if not all(specs):
        pytest.skip(f"{name} is not installed")
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    parts = sorted(part for folder in folders for part in folder.rglob(f"{about.file}*"))
    file.write_bytes(b"".join(part.read_bytes() for part in parts))
    ours, theirs = read_both(file)
    if name == "smollm2-135m":  # whose conversion does not know how its text is cut
        set_pre_tokenizer(theirs.backend_tokenizer, "smollm", file)
    check_equal(ours, theirs)
