"""Files of llama.cpp: each family's weights and settings by a second derivation, split and damaged files."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.core import run
from blendserve.errors import ModelError, ModelUnsupported
from blendserve.models.fast_load import Configuration
from blendserve.models.forward import feed
from blendserve.models.gguf_model import ROWS, read_gguf
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.weights import QuantisedMatrix, Weights

gguf = pytest.importorskip("gguf", reason="it writes the files")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from tests.support.gguf_files import MODELS, ONE_MORE, as_stored, tiny, write_model  # noqa: E402

IDS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(1))
KINDS = [*("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]  # that the package can write
# transformers reads these too. It takes the first tensor of a bias pair only if the settings say so.
THEIRS = [
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "stablelm",
        "starcoder2",
        "nemotron",
        "gemma2",
        "gemma3_text",
    )
]
ASSUMED = {"qwen3": {"head_dim": 128}}  # by transformers, which does not read it


def plain(x: Weights) -> torch.Tensor:
    return x.dequantise() if isinstance(x, QuantisedMatrix) else x.float()


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], arch: str) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        if arch in ONE_MORE and name.endswith("norm.weight"):  # x + 1 - 1
            assert torch.allclose(found[name], x, rtol=0, atol=2**-23), name
        else:
            assert torch.equal(found[name], x), name


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_file_gives_the_model_that_it_was_made_of(name: str, tmp_path: Path) -> None:
    """Its weights, its logits by our layers, and transformers' model of the same settings."""
    arch, model = MODELS[name][0], tiny(name)
    start, weights = read_gguf(write_model(tmp_path / "tiny.gguf", model, arch))
    found = {called: plain(x) for called, x in weights.items()}
    check_equal(found, as_stored(model), arch)
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    said = model(IDS[None]).logits[0, -1]
    reference: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**start.config), attn_implementation="eager"
    ).eval()
    reference.load_state_dict(found)
    assert torch.allclose(reference(IDS[None]).logits[0, -1], said, atol=1e-4)
    decoder = DecoderModel(Configuration(**start.config), found, lambda: reference)
    last = run(feed(decoder, KVCache(decoder, len(IDS)), IDS.tolist()))
    assert torch.allclose(last, said, atol=1e-3)


def test_every_architecture_is_tested() -> None:
    assert {arch for arch, _ in MODELS.values()} == ROWS.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama-untied", "gemma2", "phi3"])
def test_weights_are_as_the_file_holds_them(name: str, kind: str, tmp_path: Path) -> None:
    arch, model = MODELS[name][0], tiny(name)
    _, weights = read_gguf(write_model(tmp_path / "tiny.gguf", model, arch, kind))
    check_equal({called: plain(x) for called, x in weights.items()}, as_stored(model, kind), arch)
    held = {x.kind if isinstance(x, QuantisedMatrix) else "plain" for x in weights.values()}
    assert held == ({"plain"} if "F" in kind else {"plain", kind})


@pytest.mark.parametrize("name", THEIRS)
def test_weights_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    arch, model = MODELS[name][0], tiny(name, **ASSUMED.get(name, {}))
    padding = {"tokenizer.ggml.padding_token_id": 0}  # of Phi-3 it assumes one that is not in this vocabulary
    file = write_model(tmp_path / "tiny.gguf", model, arch, "Q8_0", more=padding)
    _, weights = read_gguf(file)
    auto: Any = AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    found = {called: plain(x) for called, x in weights.items()}
    check_equal(found, {called: theirs[called] for called in found}, arch)


def test_what_the_table_lacks_is_unsupported_and_not_damaged(tmp_path: Path) -> None:
    model = tiny("llama")
    file = write_model(tmp_path / "tiny.gguf", model, "llama", more={"llama.expert_count": 8})
    with pytest.raises(ModelUnsupported):
        read_gguf(file)
    data = file.read_bytes().replace(b"llama.expert_count", b"llama.unknown_key_")
    file.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelUnsupported):
        read_gguf(file)


def split(file: Path, count: int) -> list[Path]:
    """The same tensors in several files, the metadata in the first."""
    read = gguf.GGUFReader(file)
    paths = [file.with_name(f"{file.stem}-{n + 1:05}-of-{count:05}.gguf") for n in range(count)]
    for n, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", n)
        writer.add_uint16("split.count", count)
        for field in read.fields.values() if n == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        for tensor in list(read.tensors)[n::count]:
            writer.add_tensor(tensor.name, tensor.data.copy(), raw_dtype=tensor.tensor_type)
        for write in (
            writer.write_header_to_file,
            writer.write_kv_data_to_file,
            writer.write_tensors_to_file,
        ):
            write()
        writer.close()
    return paths


def test_a_split_file_is_read_by_any_of_its_parts(tmp_path: Path) -> None:
    model = tiny("llama")
    parts = split(write_model(tmp_path / "tiny.gguf", model, "llama", "Q8_0"), 3)
    for part in parts:
        _, weights = read_gguf(part)
        check_equal({name: plain(x) for name, x in weights.items()}, as_stored(model, "Q8_0"), "llama")
    parts[1].unlink()
    with pytest.raises(ModelError) as error:
        read_gguf(parts[0])
    assert error.value.path == str(parts[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    return write_model(file, tiny("llama-llama3"), "llama", "Q8_0").read_bytes()


def outcome(file: Path, data: bytes) -> str:
    """Whether the file's model can be used as far as it was read."""
    file.write_bytes(data)
    try:
        start, weights = read_gguf(file)
    except ModelError as error:
        if error.path != str(file):
            return "unnamed"
        return "unsupported" if isinstance(error, ModelUnsupported) else "damaged"
    assert all(x.shape for x in weights.values())
    assert start.tokenizer("!a b\u00e9")["input_ids"] is not None
    return "read"


@pytest.mark.parametrize("change", ["big-endian", "version 1", "magic", "empty"])
def test_other_files_are_refused(change: str, whole: bytes, tmp_path: Path) -> None:
    heads = {
        "big-endian": b"GGUF" + struct.pack(">I", 3),
        "version 1": b"GGUF" + struct.pack("<I", 1),
        "magic": b"GGML",
    }
    data = heads[change] + whole[len(heads[change]) :] if change in heads else b""
    assert outcome(tmp_path / "other.gguf", data) == "damaged"


@given(share=st.floats(0, 0.999))
def test_a_truncated_file_is_damaged(
    share: float, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    end = len(whole) - 32  # of padding
    assert outcome(tmp_path_factory.getbasetemp() / "short.gguf", whole[: int(share * end)]) == "damaged"


@given(seed=st.integers(0, 2**32))
def test_a_flipped_bit_is_no_crash(seed: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Most of them before the weights; a night flips 10,000."""
    generator, file = random.Random(seed), tmp_path_factory.getbasetemp() / "flipped.gguf"
    header = whole.index(b"blk.0.") + 2000
    for _ in range(settings().max_examples // 4):
        data = bytearray(whole)
        at = generator.randrange(header if generator.random() < 0.9 else len(whole))
        data[at] ^= 1 << generator.randrange(8)
        assert outcome(file, bytes(data)) in {"read", "damaged", "unsupported"}
