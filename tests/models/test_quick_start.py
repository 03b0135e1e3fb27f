"""A reader without transformers: the same to the bit, only where that was seen, and transformers' model behind it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.config import ReaderConfig
from blendserve.models import plain_llama, quick_start
from blendserve.models.loader import Reader, load_reader
from blendserve.models.plain_tokenizer import PlainTokenizer, about
from tests.support.files import own_cache
from tests.support.blending import blend, model_logits, some_prompt
from tests.support.models import tiny_model
from tests.support.tokenizers import bundled_tokenizer, spaced_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved("llama", tmp_path / "reader")


def saved(name: str, folder: Path) -> Path:
    tiny_model.__wrapped__(name).save_pretrained(folder)
    spaced_tokenizer("a b c").save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "float32") -> Reader:
    return load_reader(ReaderConfig(model=str(folder), dtype=dtype, device="cpu"))


def is_quick(reader: Reader) -> bool:
    return isinstance(reader.tokenizer, PlainTokenizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_time_it_is_quick_and_the_same(folder: Path, dtype: str) -> None:
    first, second = load(folder, dtype), load(folder, dtype)
    assert [is_quick(first), is_quick(second)] == [False, True]
    assert (second.fingerprint, second.end_tokens) == (first.fingerprint, first.end_tokens)
    prompt = some_prompt([7, 9])
    done = [blend(reader.adapter, prompt, ratio=0.5) for reader in (first, second)]
    assert torch.equal(done[0].logits, done[1].logits)
    assert torch.equal(done[0].cache.keys, done[1].cache.keys)
    assert not is_quick(load(folder, {"float32": "bfloat16", "bfloat16": "float32"}[dtype]))


def test_the_borrowed_model_is_there_when_it_is_asked_for(folder: Path) -> None:
    first, second = load(folder), load(folder)
    prompt = some_prompt([7])
    assert torch.equal(model_logits(second.adapter, prompt), model_logits(first.adapter, prompt))
    model: Any = second.adapter.model
    assert type(model) is type(first.adapter.model)
    assert model is second.adapter.model
    shared = {x.data_ptr() for x in second.adapter._runs.parameters()}
    assert {x.data_ptr() for x in model.parameters()} == shared, "one copy of the weights"


@pytest.mark.parametrize("name", ["qwen2", "llama-linear"])
def test_models_that_are_not_plain_are_transformers_s(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "reader")
    load(folder)
    assert not is_quick(load(folder))


def another_norm(norm: Any, x: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    out: Tensor = (norm.weight * wide * (1 + 1e-6)).to(x.dtype)
    return out


def another_angle(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[..., None].float() * rotary.inv_freq * 1.001
    twice = torch.cat((angles, angles), dim=-1)
    return twice.cos().to(x.dtype), twice.sin().to(x.dtype)


@pytest.mark.parametrize(("kind", "wrong"), [("_Norm", another_norm), ("_Rotary", another_angle)])
def test_what_differs_by_a_bit_is_not_kept(
    kind: str, wrong: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(plain_llama, kind), "forward", wrong)
    load(folder)
    assert not is_quick(load(folder))


def test_a_tokenizer_that_differs_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainTokenizer, "decode", lambda *args, **options: "")
    load(folder)
    assert not is_quick(load(folder))


def test_changed_files_are_read_anew(folder: Path) -> None:
    load(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    assert not is_quick(load(folder))
    assert is_quick(load(folder))


def test_other_weights_of_the_same_size_and_time_are_noticed(folder: Path) -> None:
    before = load(folder).fingerprint
    file = folder / "model.safetensors"
    before_it, raw = file.stat(), bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(before_it.st_atime_ns, before_it.st_mtime_ns))
    after = load(folder)
    assert not is_quick(after)
    assert after.fingerprint != before


def test_a_damaged_record_is_none(folder: Path, tmp_path: Path) -> None:
    fingerprint = load(folder).fingerprint
    for file in (tmp_path / "cache").rglob("about.json"):
        file.write_text("{")
    again = load(folder)
    assert not is_quick(again)
    assert again.fingerprint == fingerprint
    assert is_quick(load(folder))


def test_chat_templates_and_copies(folder: Path) -> None:
    tokenizer = copy.deepcopy(bundled_tokenizer())  # its template is set below
    backend = tokenizer.backend_tokenizer.__class__.from_str(tokenizer.backend_tokenizer.to_str())
    ours = PlainTokenizer(backend, about(tokenizer))
    assert quick_start._same_texts(ours, tokenizer)
    assert quick_start._same_texts(copy.deepcopy(ours), tokenizer)
    for template in (
        "{% for m in messages %}{{ m['content'] | tojson }}{% break %}{% endfor %}{{ bos_token }}",
        "{{ raise_exception('no') }}",
        "{%- if tools is none %}\n  {{ messages[0]['role'] }}\n{%- endif %}",
    ):
        tokenizer.chat_template = template
        ours = PlainTokenizer(backend, about(tokenizer))
        assert quick_start._same_texts(ours, tokenizer)


def test_transformers_is_not_imported(folder: Path) -> None:
    load(folder)
    code = (
        "import sys; from blendserve.config import ReaderConfig; from blendserve.models.loader import load_reader; "
        "from blendserve.engine import engine; from blendserve.retrieve import Embedder; Embedder.load(); "
        "load_reader(ReaderConfig(model=sys.argv[1], dtype='float32', device='cpu')); "
        "print(sorted({'transformers', 'torch._dynamo', 'scipy', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]", done.stderr
