"""GGUF files dequantised into a folder: the bundled one and users', or refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from transformers import AutoTokenizer

from blendserve.config import ModelConfig
from blendserve.errors import ModelError, ModelUnsupported
from blendserve.models import dequantised as converter
from blendserve.models import pre_tokenizers, sources
from blendserve.models.loader import LoadedModel, load_model, load_tokenizer
from blendserve.models.sources import gguf_folder
from tests.support.files import own_cache
from tests.support.gguf_files import as_stored, tiny, write_model

pytest.importorskip("gguf", reason="the reference is the package gguf")
pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")

try:  # since transformers 5.23
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:
    GGUF_PRE_TOKENIZER_SPLITS = {}

FFN_UP = "blk.1.ffn_up.weight"


def write(
    file: Path,
    name: str = "llama",
    more: Mapping[str, Any] = MappingProxyType({}),
    changed: Mapping[str, Tensor | None] = MappingProxyType({}),
    **settings: Any,
) -> Path:
    """A small model with random weights. more: metadata; changed: tensors; None = there is none."""
    return write_model(file, tiny(name, **settings), name, more=more, changed=changed)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


def load(file: Path) -> LoadedModel:
    return load_model(ModelConfig(name=str(file), dtype="float32", device="cpu", weights="bf16"))


SLOW_IMPORTS = {"transformers", "torch._dynamo", "gguf", "accelerate", "scipy", "sympy"}


def test_the_first_start_imports_no_slow_package() -> None:
    code = (
        "import sys; from blendserve.config import ModelConfig; from blendserve.models.loader import load_model; "
        "from blendserve.engine import engine; from blendserve.retrieve import Embedder; Embedder.load(); "
        f"load_model(ModelConfig(device='cpu')); print(sorted({SLOW_IMPORTS} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_a_folder_has_the_weights_of_the_file_rounded_once_and_its_tokenizer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "CHUNK", 7)  # tensors are dequantised in pieces
    model, folder = tiny("llama"), tmp_path / "folder"
    folder.mkdir()
    start = converter.write_folder(write_model(tmp_path / "tiny.gguf", model, "llama", kind), folder)
    found, expected = load_file(folder / "model.safetensors"), as_stored(model, kind)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x.to(torch.bfloat16)), name
    for text in (CUT, "ab<0>b"):
        assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == start.tokenizer(text)["input_ids"]


CUT = "It's 12345\n\n 6.7  camelCase\u00e9\r\n\r\n \u6f22\u5b57 x!?\n"


def pieces(tokenizer: Any) -> list[str]:
    return [
        CUT[slice(*place)] for _, place in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(CUT)
    ]


@pytest.mark.parametrize("pre", [*sorted(pre_tokenizers.BY_NAME), None])
def test_text_is_cut_as_the_file_says(pre: str | None, tmp_path: Path) -> None:
    """In a conversion by transformers, too; and as by transformers where it knows the name."""
    file = write(tmp_path / "tiny.gguf", more={"tokenizer.ggml.pre": pre})
    (tmp_path / "ours").mkdir()
    made = converter.write_folder(file, tmp_path / "ours").tokenizer
    loaded = load_tokenizer(ModelConfig(name=str(file)))
    assert "".join(pieces(made)) == CUT
    assert pieces(loaded) == pieces(made)
    backends = [json.loads(each.backend_tokenizer.to_str()) for each in (made, loaded)]
    assert backends[0] == backends[1]
    assert backends[0]["model"]["ignore_merges"] == (pre in pre_tokenizers.WHOLE_TOKENS)
    if split := GGUF_PRE_TOKENIZER_SPLITS.get(str(pre)):
        theirs = Split(Regex(split), "isolated").pre_tokenize_str(CUT)
        assert pieces(made) == [piece for piece, _ in theirs]


# By hand: the pieces of the text, with a bar between them.
CUTS = {
    "smollm": "It|'s| |1|2|3|4|5|\n\n |6|.|7| | camelCase\xe9|\r\n\r\n| \u6f22\u5b57",
    "gpt-2": "It|'s| 12345|\n\n| 6|.|7| | camelCase\xe9|\r\n\r\n| \u6f22\u5b57",
    "qwen2": "It|'s| |1|2|3|4|5|\n\n| |6|.|7| | camelCase\xe9|\r\n\r\n| \u6f22\u5b57",
    "llama-bpe": "It|'s| |123|45|\n\n| |6|.|7| | camelCase\xe9|\r\n\r\n| \u6f22\u5b57",
    "gpt-4o": "It's| |123|45|\n\n| |6|.|7| | camel|Case\xe9|\r\n\r\n| \u6f22\u5b57",
}


@pytest.mark.parametrize("pre", CUTS)
def test_the_cuts_are_these(pre: str, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    file = write(tmp_path / "tiny.gguf", more={"tokenizer.ggml.pre": pre})
    made = converter.write_folder(file, tmp_path / "ours")
    expected = CUTS[pre].split("|")
    assert pieces(made.tokenizer)[: len(expected)] == expected


@pytest.mark.parametrize("pre", ["nonsense", None])
def test_a_pre_tokenizer_that_is_not_known_is_warned_of(
    pre: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(write(tmp_path / "tiny.gguf", more={"tokenizer.ggml.pre": pre}))
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert pre is None or pre in said.message


def test_another_conversion_makes_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "tiny.gguf")
    before = gguf_folder(file)
    monkeypatch.setattr(sources, "CONVERSION", sources.CONVERSION + 1)
    assert gguf_folder(file) != before


def test_a_user_s_file_is_converted_once_and_known_by_its_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "blendserve.models.sources")
    file = write(tmp_path / "mine.gguf", "qwen2")
    first = load(file)
    assert (first.name, first.decoder.config.model_type) == (str(file), "qwen2")
    assert load(file.rename(tmp_path / "moved.GGUF")).fingerprint == first.fingerprint
    assert len(caplog.records) == 1
    assert load(write(file, "qwen2", tie_word_embeddings=True)).fingerprint != first.fingerprint
    assert len(caplog.records) == 2


def test_a_part_alone_is_refused_as_such_and_one_of_one_is_whole(tmp_path: Path) -> None:
    part = write(tmp_path / "tiny-00001-of-00002.gguf", more={"split.count": 2}, changed={FFN_UP: None})
    with pytest.raises(ModelError) as error:
        load(part)
    assert error.value.path == str(tmp_path / "tiny-00002-of-00002.gguf")
    with pytest.raises(ModelError) as error:
        load(part.rename(tmp_path / "renamed.gguf"))
    assert "2 parts" in str(error.value)  # allow: it was called damaged
    load(write(tmp_path / "tiny-00001-of-00001.gguf", more={"split.count": 1}))


REFUSED: list[Any] = [
    {"name": "qwen2", "more": {"qwen2.rope.scaling.type": "yarn"}},
    {"eos_token_id": 999},
    {"changed": {"rope_freqs.weight": torch.rand(8)}},  # scales its RoPE
    {"changed": {FFN_UP: None}},
    {"changed": {"token_embd.weight": None}},
    {"changed": {"blk.0.attn_k.weight": torch.rand(64, 64)}},
    *("bloom", "other"),  # architectures: one that transformers reads, and one that it does not
    *(b"", b"not at all", b"GGUF\x01\0\0\0" + bytes(16), "short", "missing"),
]


@pytest.mark.parametrize("content", REFUSED)
def test_files_that_cannot_be_used_are_refused_by_name(content: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "tiny.gguf", **content if isinstance(content, dict) else {})
    data = file.read_bytes()
    if content == "missing":
        file.unlink()
    elif content == "short":
        file.write_bytes(data[:-10_000])
    elif isinstance(content, str):
        file.write_bytes(data.replace(b"llama", content.encode()))
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(ModelError) as error:
        load(file)
    assert error.value.path == str(file) or isinstance(error.value, ModelUnsupported)
