"""GGUF files: dequantised as by the `gguf` package, converted as by transformers, refused when damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from blendserve.config import ReaderConfig
from blendserve.errors import ModelError
from blendserve.models import quick_start
from blendserve.models.gguf import QUANTISATIONS, Gguf, UnsupportedGguf
from blendserve.models.gguf_folder import write_folder
from blendserve.models.loader import BUNDLED, VOLATILE, bundled_folder, fingerprint, load_reader
from blendserve.models.plain_tokenizer import PlainTokenizer
from tests.support.files import own_cache

gguf = pytest.importorskip("gguf", reason="the reference is the package gguf")
pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")

TEXTS = (
    "The cat sat on 12 mats.\n\n",
    " na\u00efve \u6f22\u5b57 \U0001f642\t x",
    "",
    "a<|im_start|>user\nb<|im_end|><|endoftext|> <file_sep>c",
    "  def f(x):\n\treturn x**2  # \u00b2\r\n",
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What <|im_end|> is 2 + 2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Why?"},
]
HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 64, 96, 4, 2, 16, 2
BIASES = {
    f"blk.{l}.attn_{part}.bias": (heads * DIM,)
    for l in range(LAYERS)
    for part, heads in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items()
}


def theirs(file: Path, folder: Path) -> Path:
    """transformers' conversion."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
        dtype=torch.bfloat16,
    )
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def ours(file: Path, folder: Path) -> Path:
    folder.mkdir()
    write_folder(Gguf(file), folder)
    return folder


def settings(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.config.to_dict().items() if name not in VOLATILE}


def check_equal(one: Path, other: Path) -> None:
    """Whether two folders hold the same model and tokenizer."""
    mine, wanted = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert mine.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name], tensor), name
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in (one, other)]
    assert settings(models[0]) == settings(models[1])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert len({getattr(model.generation_config, name) for model in models}) == 1
    assert fingerprint(models[0]) == fingerprint(models[1])
    files = [json.loads((folder / "tokenizer.json").read_text("utf-8")) for folder in (one, other)]
    assert files[0] == files[1]
    check_equal_tokenizers(*(AutoTokenizer.from_pretrained(folder) for folder in (one, other)))


def check_equal_tokenizers(mine: Any, wanted: Any) -> None:
    assert mine.special_tokens_map == wanted.special_tokens_map
    assert len(mine) == len(wanted)
    for text in TEXTS:
        for options in ({}, {"add_special_tokens": False}, {"split_special_tokens": True}):
            assert mine(text, **options)["input_ids"] == wanted(text, **options)["input_ids"]
    assert mine.chat_template == wanted.chat_template
    if wanted.chat_template:
        for chat in (CHAT, CHAT[1:2]):
            said = [
                t.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for t in (mine, wanted)
            ]
            assert said[0] == said[1]


def write_tiny(file: Path, kind: str = "F32", **changed: Any) -> Path:
    """A llama of two layers with random weights, by the gguf package. changed: settings that differ."""
    writer = gguf.GGUFWriter(file, changed.get("architecture", "llama"))
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    if "scaling" in changed:
        writer.add_rope_scaling_type(gguf.RopeScalingType(changed["scaling"]))
    letters = list("abcdefghijklmnopqrstuvwxyz \n")
    tokens = [
        "<|endoftext|>",
        "<s>",
        "</s>",
        *["\u0120" if c == " " else "\u010a" if c == "\n" else c for c in letters],
    ]
    merges = ["t h", "th e", "\u0120 a"]
    tokens += [merge.replace(" ", "") for merge in merges]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("pre", "default"))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(changed.get("eos", 2))
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(changed.get("add_bos", False))
    rng, quantised = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    if changed.get("untied"):
        shapes["output"] = (len(tokens), HIDDEN)
    for l in range(LAYERS):
        shapes |= {
            f"blk.{l}.attn_norm": (HIDDEN,),
            f"blk.{l}.ffn_norm": (HIDDEN,),
            f"blk.{l}.attn_q": (HEADS * DIM, HIDDEN),
            f"blk.{l}.attn_k": (KV_HEADS * DIM, HIDDEN),
            f"blk.{l}.attn_v": (KV_HEADS * DIM, HIDDEN),
            f"blk.{l}.attn_output": (HIDDEN, HEADS * DIM),
            f"blk.{l}.ffn_gate": (INNER, HIDDEN),
            f"blk.{l}.ffn_up": (INNER, HIDDEN),
            f"blk.{l}.ffn_down": (HIDDEN, INNER),
        }
    for name, shape in {**shapes, **changed.get("shapes", {})}.items():
        if shape is None:
            continue
        values = rng.standard_normal(shape).astype(np.float32)
        one = len(shape) == 1
        data = values if one else gguf.quantize(values, quantised)
        full = name if name.endswith(".bias") else f"{name}.weight"
        writer.add_tensor(full, data, raw_dtype=None if one or kind == "F32" else quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def bundled() -> Path:
    spec = find_spec(BUNDLED["smollm2-135m"].package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / BUNDLED["smollm2-135m"].gguf


def test_the_bundled_model_is_converted_as_transformers_converts_it(bundled: Path, tmp_path: Path) -> None:
    check_equal(ours(bundled, tmp_path / "ours"), theirs(bundled, tmp_path / "theirs"))


def test_what_is_stored_for_the_bundled_model_is_what_a_comparison_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with transformers' model and tokenizer (`quick_start.keep`), in both dtypes of a CPU."""
    own_cache(tmp_path / "cache", monkeypatch)
    bundled_folder("smollm2-135m")
    starts = tmp_path / "cache" / "blendserve" / "starts"
    stored = {entry.name: known(entry) for entry in starts.iterdir()}
    assert len(stored) == 2
    shutil.rmtree(starts)
    for dtype in ("bfloat16", "float32"):
        config = ReaderConfig(dtype=dtype, device="cpu")
        compared, quick = load_reader(config), load_reader(config)
        assert isinstance(quick.tokenizer, PlainTokenizer)
        assert not isinstance(compared.tokenizer, PlainTokenizer)
        assert quick.fingerprint == compared.fingerprint
    assert {entry.name: known(entry) for entry in starts.iterdir()} == stored


def known(entry: Path) -> tuple[Any, ...]:
    about = json.loads((entry / quick_start.ABOUT).read_text("utf-8"))
    config = {name: value for name, value in about["config"].items() if name not in VOLATILE}
    tokenizer = json.loads((entry / quick_start.TOKENIZER).read_text("utf-8"))
    return config, about["tokenizer"], about["end_tokens"], tokenizer


def test_the_first_start_imports_neither_transformers_nor_its_gguf_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    code = (
        "import sys; from blendserve.config import ReaderConfig; from blendserve.models.loader import load_reader; "
        "load_reader(ReaderConfig(device='cpu')); "
        "print(sorted({'transformers', 'gguf', 'accelerate', 'scipy', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("F32", {}),
        ("F16", {"untied": True}),
        ("BF16", {"add_bos": True}),
        ("Q4_0", {}),
        ("Q8_0", {"untied": True}),
    ],
)
def test_a_small_llama_is_converted_as_transformers_converts_it(
    kind: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", kind, **changed)
    check_equal(ours(file, tmp_path / "ours"), theirs(file, tmp_path / "theirs"))


def test_a_user_s_file_is_converted_once_and_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    file, told = write_tiny(tmp_path / "mine.gguf"), list[str]()
    config = ReaderConfig(model=str(file), dtype="float32", device="cpu")
    first = load_reader(config, told.append)
    assert first.name == str(file)
    assert len(told) == 1
    file.rename(tmp_path / "moved.GGUF")
    moved = load_reader(ReaderConfig(model=str(tmp_path / "moved.GGUF"), dtype="float32"), told.append)
    assert (moved.fingerprint, len(told)) == (first.fingerprint, 1)
    write_tiny(file, untied=True)
    assert load_reader(config, told.append).fingerprint != first.fingerprint
    assert len(told) == 2


def test_the_bundled_file_by_its_path_is_the_bundled_model(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    by_path, by_name = (
        load_reader(ReaderConfig(model=model, dtype="bfloat16", device="cpu"))
        for model in (str(bundled), "smollm2-135m")
    )
    assert by_path.fingerprint == by_name.fingerprint
    assert isinstance(by_path.tokenizer, PlainTokenizer)


def test_another_architecture_is_converted_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    file = write_tiny(tmp_path / "qwen.gguf", architecture="qwen2", shapes=BIASES)
    reader = load_reader(ReaderConfig(model=str(file), dtype="float32", device="cpu"))
    model: Any = reader.adapter.model
    assert model.config.model_type == "qwen2"
    assert torch.equal(
        model.model.embed_tokens.weight, Gguf(file).tensor("token_embd.weight", torch.bfloat16).float()
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "gpt2"}, "transformers cannot convert .*tiny.gguf|'gpt2' cannot be blended"),
        ({"architecture": "deepseek2"}, "transformers cannot convert .*tiny.gguf"),
        ({"shapes": {"rope_freqs": (DIM // 2,)}}, "scales its RoPE"),
        ({"architecture": "qwen2", "scaling": "yarn"}, "scales its RoPE"),
    ],
)
def test_files_that_cannot_be_used(
    changed: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    file = write_tiny(tmp_path / "tiny.gguf", **changed)
    with pytest.raises(ModelError, match=message):
        load_reader(ReaderConfig(model=str(file), device="cpu"))
    with pytest.raises(ModelError, match=r"there is no file .*absent\.gguf"):
        load_reader(ReaderConfig(model=str(tmp_path / "absent.gguf")))


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_random_blocks_are_dequantised_as_the_gguf_package_does(kind: int) -> None:
    ours, theirs = QUANTISATIONS[kind], gguf.GGMLQuantizationType(kind)
    assert (ours.name, ours.elements, ours.n_bytes) == (theirs.name, *gguf.GGML_QUANT_SIZES[theirs])
    blocks = np.random.default_rng(kind).integers(0, 256, (500, ours.n_bytes), np.uint8)
    plain = {"F32": np.float32, "F16": np.float16}
    with np.errstate(invalid="ignore"):
        wanted = gguf.dequantize(blocks.view(plain.get(ours.name, np.uint8)), theirs)
        found = ours.values(blocks)
    assert found.shape == (500, ours.elements)
    assert found.dtype == np.float32
    wanted = wanted.astype(np.float32).reshape(found.shape)
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_tensors_larger_than_one_piece(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    values = np.random.default_rng(0).standard_normal((300, 512)).astype(np.float32)
    writer.add_tensor("plain", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert torch.equal(Gguf(tmp_path / "large.gguf").tensor("plain"), torch.from_numpy(values))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shapes": {"blk.1.ffn_up": None}}, r"'blk\.1\.ffn_up\.weight' is missing"),
        ({"shapes": {"token_embd": None}}, r"'token_embd\.weight' is missing"),
        ({"shapes": {"blk.0.attn_k": (HIDDEN, HIDDEN)}}, r"'blk\.0\.attn_k\.weight' is of shape \[64, 64\]"),
        ({"eos": 999}, "special tokens do not fit"),
    ],
)
def test_a_file_whose_parts_do_not_fit(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"tiny.gguf is damaged: .*{message}"):
        ours(write_tiny(tmp_path / "tiny.gguf", **changed), tmp_path / "ours")


@pytest.mark.parametrize(
    "changed",
    [{"shapes": {"rope_freqs": (DIM // 2,)}}, {"shapes": {"blk.0.attn_q_norm": (DIM,)}}, {"pre": "qwen2"}],
)
def test_what_is_not_plain_is_left_to_transformers(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedGguf, match=r"tiny\.gguf"):
        ours(write_tiny(tmp_path / "tiny.gguf", **changed), tmp_path / "ours")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0")


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    for name, data in {"empty": b"", "text": b"not at all", "old": b"GGUF\x01\0\0\0" + bytes(16)}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelError, match=name):
            Gguf(tmp_path / name)
    with pytest.raises(ModelError, match="absent cannot be read"):
        Gguf(tmp_path / "absent")


@given(st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    raw = tiny.read_bytes()
    short = tmp_path_factory.mktemp("short") / "short.gguf"
    short.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ModelError, match=r"short\.gguf"):
        Gguf(short)


@given(st.data())
def test_a_changed_byte_is_refused_or_read(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Never another error than ModelError, and never an allocation by a length that the file does not have."""
    raw = bytearray(tiny.read_bytes())
    header = len(raw) - 20_000
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, header))] = data.draw(st.sampled_from([0, 1, 4, 9, 127, 128, 255]))
    folder = tmp_path_factory.mktemp("changed")
    (folder / "changed.gguf").write_bytes(raw)
    with suppress(ModelError):
        ours(folder / "changed.gguf", folder / "ours")
