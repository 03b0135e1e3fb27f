"""Model folders that are broken, of another kind or lack weights: a ModelError, never an answer or a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blendserve.config import ModelConfig
from blendserve.errors import ModelError, ModelUnsupported
from blendserve.models.loader import LoadedModel, load_model
from tests.support.blending import model_logits, some_prompt
from tests.support.files import own_cache
from tests.support.models import tiny_model
from tests.support.tokenizers import spaced_tokenizer

PROMPT = some_prompt([7, 9])
WEIGHTS = "model.safetensors"
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing wrong."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_model.__wrapped__("llama").save_pretrained(folder)
    spaced_tokenizer("a b c").save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelConfig(name=str(folder), dtype=dtype, device="cpu"))


def change_json(folder: Path, name: str, **values: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: x for name, x in weights.items()}


LACKING: dict[
    str, tuple[Callable[[Path], object], str]
] = {  # what is done, and the first weights that are missing
    "no lm_head": (
        lambda f: change_weights(f, lambda w: {n: x for n, x in w.items() if n != "lm_head.weight"}),
        "lm_head.weight",
    ),
    "torch.compile's prefix": (
        lambda f: change_weights(f, prefixed("_orig_mod.")),
        "lm_head.weight",
    ),
    "PEFT's prefix": (lambda f: change_weights(f, prefixed("base_model.model.")), "lm_head.weight"),
    "no layer 3": (
        lambda f: change_weights(f, lambda w: {n: x for n, x in w.items() if ".layers.3." not in n}),
        "model.layers.3.input_layernorm.weight",
    ),
    "a layer more in the configuration": (
        lambda f: change_json(f, "config.json", num_hidden_layers=5),
        "model.layers.4.input_layernorm.weight",
    ),
    "a wider MLP in the configuration": (
        lambda f: change_json(f, "config.json", intermediate_size=112),
        "model.layers.0.mlp.down_proj.weight",
    ),
}


@pytest.mark.parametrize("kind", LACKING)
def test_weights_that_are_missing_are_named_instead_of_drawn_at_random(
    kind: str, whole: Path, tmp_path: Path
) -> None:
    change, name = LACKING[kind]
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    load(folder)  # and so has a record, from which a start needs no transformers
    change(folder)
    for _ in range(2):
        with pytest.raises(ModelError) as error:
            load(folder)
        assert name in str(error.value)  # allow: the missing weights are what it must say
        assert error.value.path == str(folder)


def test_weights_that_are_too_many_or_tied_are_no_error(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "more"))
    change_weights(folder, lambda w: {**w, "extra.weight": torch.ones(3)})
    expected = model_logits(load(whole).decoder, PROMPT)
    assert torch.equal(model_logits(load(folder).decoder, PROMPT), expected)
    assert [record.levelname for record in caplog.records if "extra.weight" in record.message] == ["WARNING"]
    tied = tiny_model.__wrapped__("gemma3_text")  # has no lm_head in its file
    tied.save_pretrained(tmp_path / "tied")
    spaced_tokenizer("a b c").save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / WEIGHTS)
    load(tmp_path / "tied")


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def shards(folder: Path) -> None:
    """The index names a file that is not there."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    names = [f"model-0000{1 + (n == 'lm_head.weight')}-of-00002.safetensors" for n in weights]
    index = {"metadata": {}, "weight_map": dict(zip(weights, names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cycle(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)

    return make


def remove(*names: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def in_turn(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [change(folder) for change in changes]


def configure(**values: Any) -> Callable[[Path], object]:
    return lambda folder: change_json(folder, "config.json", **values)


def quantised(**about: Any) -> Callable[[Path], object]:
    return configure(quantization_config=about)


ADAPTER = json.dumps({"base_model_name_or_path": "base", "peft_type": "LORA", "task_type": "CAUSAL_LM"})
BROKEN: dict[str, Callable[[Path], object]] = {
    "adapter beside a model": write("adapter_config.json", ADAPTER),
    "adapter of no JSON": write("adapter_config.json", "["),
    "gptq": quantised(quant_method="gptq", bits=4, group_size=128),
    "awq": quantised(quant_method="awq", bits=4, version="gemm"),
    "bitsandbytes": quantised(load_in_4bit=True),
    "compressed-tensors": quantised(quant_method="compressed-tensors", config_groups={}),
    "hqq": quantised(quant_method="hqq", quant_config={}),
    "exl3": quantised(quant_method="exl3", bits=4),
    "quantised by a list": configure(quantization_config=[4]),
    "no config": remove("config.json"),
    "empty config": write("config.json", ""),
    "config cut": write("config.json", '{"model_type": "llama", '),
    "config of bytes": write("config.json", b"\xff\xfe\x00"),
    "config is a list": write("config.json", "[1, 2]"),
    "config is a number": write("config.json", "7"),
    "config is deep": write("config.json", "[" * 100_000),
    "config is a folder": in_turn(remove("config.json"), lambda folder: (folder / "config.json").mkdir()),
    "config in a circle": cycle("config.json"),
    "no model type": configure(model_type=None),
    "an unknown model type": configure(model_type="nonsense"),
    "model type of a number": configure(model_type=7),
    "10^9 layers": configure(num_hidden_layers=10**9),
    "negative layers": configure(num_hidden_layers=-1),
    "no heads": configure(num_attention_heads=0),
    "negative heads": configure(num_attention_heads=-1),
    "5 heads": configure(num_attention_heads=5),
    "text for a number": configure(hidden_size="wide"),
    "null for a number": configure(hidden_size=None),
    "huge vocabulary": configure(vocab_size=10**15),
    "other vocabulary": configure(vocab_size=98),
    "unknown activation": configure(hidden_act="nonsense"),
    "unknown dtype": configure(dtype="float99"),
    "unknown rope": configure(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}),
    "rope of text": configure(rope_parameters="wide"),
    "no weights": remove(WEIGHTS),
    "empty weights": write(WEIGHTS, b""),
    "weights of text": write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "weights with a huge header": write(WEIGHTS, (2**62).to_bytes(8, "little") + b"x" * 100),
    "weights with a header of no JSON": write(WEIGHTS, (4).to_bytes(8, "little") + b"\xff{}\x00"),
    "weights cut": lambda f: write(WEIGHTS, (f / WEIGHTS).read_bytes()[:-1000])(f),
    "weights in a circle": cycle(WEIGHTS),
    "pickled weights": in_turn(remove(WEIGHTS), write("pytorch_model.bin", b"\x80\x04.")),
    "shard missing": shards,
    "index of no JSON": in_turn(shards, write("model.safetensors.index.json", "{")),
    "index is a list": in_turn(shards, write("model.safetensors.index.json", "[]")),
    "no tokenizer": remove("tokenizer.json", "tokenizer_config.json"),
    "tokenizer cut": write("tokenizer.json", "{"),
    "tokenizer is a list": write("tokenizer.json", "[]"),
    "tokenizer of another form": write("tokenizer.json", '{"model": {"type": "Nonsense"}}'),
    "tokenizer's settings cut": write("tokenizer_config.json", "{"),
    "tokenizer's settings are a list": write("tokenizer_config.json", "[]"),
    "tokenizer of an unknown class": write("tokenizer_config.json", '{"tokenizer_class": 7}'),
    "generation settings cut": write("generation_config.json", "{"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_that_cannot_be_used_is_a_model_error(kind: str, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    BROKEN[kind](folder)
    with pytest.raises(ModelError) as error:
        load(folder)
    assert error.value.path or isinstance(error.value, ModelUnsupported)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "nul\0", "a/b/c", ".", "/dev/null", "x" * 5000 + ".gguf", "\0.gguf"]
)
def test_a_name_that_no_model_can_have_is_a_model_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        load(Path(name)) if "/" not in name else load_model(ModelConfig(name=name, device="cpu"))
