"""Folders of GPTQ, AWQ and compressed-tensors, against a second derivation of what each method stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blendserve.config import ModelConfig
from blendserve.core import run
from blendserve.errors import ModelError
from blendserve.kernels.selfcheck import widest
from blendserve.models.forward import feed
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel, load_model
from blendserve.models.quantised_folder import QuantisedFolder
from blendserve.models.weights import QuantisedMatrix
from tests.support.models import config, from_config
from tests.support.tokenizers import bundled_tokenizer

Tensors = dict[str, Tensor]
# Which columns the codes of one word of AWQ are of, from its lowest bits.
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


def words(codes: Tensor, bits: int, columns: list[int] | None = None) -> Tensor:
    """Pack each row's codes into int32, the first lowest, by arithmetic in int64."""
    n = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % n)).view(len(codes), -1, n)
    packed = sum(padded[..., column] << bits * at for at, column in enumerate(columns or range(n)))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


class Made:
    """A random quantised matrix [outputs, inputs] and its plain numbers."""

    def __init__(
        self, outputs: int, inputs: int, bits: int, group: int, zero: int | None, is_shuffled: bool
    ) -> None:
        n = inputs // group
        generator = torch.Generator().manual_seed(outputs + inputs)
        self.bits = bits
        self.codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
        self.scales = (torch.rand(outputs, n, generator=generator) * 0.02 + 0.001).half()
        zeros = torch.randint(1, 1 << bits, (outputs, n), generator=generator)
        self.zeros = zeros if zero is None else torch.full((outputs, n), zero)
        self.group_of = torch.arange(inputs) // group
        if is_shuffled:
            self.group_of = self.group_of[torch.randperm(inputs, generator=generator)]
        self.plain = torch.empty(outputs, inputs)
        for column, g in enumerate(self.group_of.tolist()):
            self.plain[:, column] = (self.codes[:, column] - self.zeros[:, g]).float() * self.scales[
                :, g
            ].float()

    def gptq(self, base: str, version: int = 1) -> Tensors:
        return {
            f"{base}.qweight": words(self.codes, self.bits).T,
            f"{base}.qzeros": words((self.zeros - int(version == 1)).T, self.bits),
            f"{base}.scales": self.scales.T,
            f"{base}.g_idx": self.group_of.int(),
        }

    def awq(self, base: str) -> Tensors:
        return {
            f"{base}.qweight": words(self.codes.T, 4, AWQ_COLUMNS),
            f"{base}.qzeros": words(self.zeros.T, 4, AWQ_COLUMNS),
            f"{base}.scales": self.scales.T,
        }

    def compressed(self, base: str, is_symmetric: bool) -> Tensors:
        made = {
            f"{base}.weight_packed": words(self.codes, self.bits),
            f"{base}.weight_scale": self.scales,
            f"{base}.weight_shape": torch.tensor(self.codes.shape),
        }
        return (
            made if is_symmetric else {**made, f"{base}.weight_zero_point": words(self.zeros.T, self.bits).T}
        )

    def as_bytes(self, base: str) -> Tensors:
        return {f"{base}.weight": (self.codes - 128).to(torch.int8), f"{base}.weight_scale": self.scales}


GPTQ = {"quant_method": "gptq", "bits": 4}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
COMPRESSED = {"quant_method": "compressed-tensors"}
# name -> settings, bits, group, zero (None = at random), whether inputs are shuffled, what is written, kind of the blocks
FORMS: dict[str, tuple[dict[str, Any], int, int, int | None, bool, Callable[[Made, str], Tensors], str | None]] = {
    "gptq": (GPTQ, 4, 128, 8, False, Made.gptq, "Q4_0"),
    "gptq in groups of 32": (GPTQ, 4, 32, 8, False, Made.gptq, "Q4_0"),
    "gptq with zeros": (GPTQ, 4, 64, None, False, Made.gptq, "Q4_1"),
    "gptq by order of activation": (GPTQ, 4, 128, 8, True, Made.gptq, None),
    "gptq, version 2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"}, 4, 128, None, False, lambda x, base: x.gptq(base, 2), "Q4_1",
    ),
    "gptq in 8 bits": ({**GPTQ, "bits": 8}, 8, 128, 128, False, Made.gptq, "Q8_0"),
    "gptq in 2 bits": ({**GPTQ, "bits": 2}, 2, 128, 2, False, Made.gptq, None),
    "gptq in groups of 16": (GPTQ, 4, 16, 8, False, Made.gptq, None),
    "awq": (AWQ, 4, 128, None, False, Made.awq, "Q4_1"),
    "compressed": (COMPRESSED, 4, 128, 8, False, lambda x, base: x.compressed(base, True), "Q4_0"),
    "compressed with zeros": (COMPRESSED, 4, 32, None, False, lambda x, base: x.compressed(base, False), "Q4_1"),
    "compressed in 8 bits": (COMPRESSED, 8, 128, 128, False, lambda x, base: x.compressed(base, True), "Q8_0"),
    "compressed as bytes": (COMPRESSED, 8, 256, 128, False, Made.as_bytes, "Q8_0"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_a_matrix_is_what_the_method_stored(name: str, keeps_blocks: bool, tmp_path: Path) -> None:
    about, bits, group, zero, is_shuffled, write, kind = FORMS[name]
    made = Made(48, 256, bits, group, zero, is_shuffled)
    plain = {"norm.weight": torch.ones(3)}
    tensors = {called: x.contiguous() for called, x in write(made, "a.q_proj").items()}
    save_file({**plain, **tensors}, tmp_path / "model.safetensors")
    weights = QuantisedFolder(tmp_path, about, keeps_blocks)
    assert set(weights) == {"norm.weight", "a.q_proj.weight"}
    found = weights["a.q_proj.weight"]
    if not keeps_blocks or kind is None:
        assert isinstance(found, Tensor)
        assert torch.equal(found, made.plain)
        return
    pytest.importorskip("gguf", reason="it dequantises blocks")
    assert isinstance(found, QuantisedMatrix)
    assert found.kind == kind
    most = 2**-11 * made.plain.abs().max() if kind == "Q4_1" else 0.0  # of its minimum in fp16
    assert (found.dequantise() - made.plain).abs().max() <= 1.001 * most


def test_scales_that_fp16_cannot_hold_are_not_rounded(tmp_path: Path) -> None:
    made = Made(48, 256, 4, 128, 8, False)
    made.scales = made.scales.float() * 1.0001
    tensors = {name: x.contiguous() for name, x in made.compressed("a.q_proj", True).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = QuantisedFolder(tmp_path, COMPRESSED, keeps_blocks=True)["a.q_proj.weight"]
    assert isinstance(found, Tensor)
    assert torch.allclose(found, made.plain * 1.0001)


@pytest.mark.parametrize("shape", [(1,), (48, 1), (3, 2)])
def test_fp8_is_scaled_by_matrix_output_or_block(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scale = torch.randn(48, 256).to(torch.float8_e4m3fn), torch.rand(shape)
    save_file({"a.weight": weight, "a.weight_scale": scale}, tmp_path / "model.safetensors")
    found = QuantisedFolder(tmp_path, COMPRESSED, keeps_blocks=True)["a.weight"]
    full = scale.view(-1, 1) if len(shape) == 1 else scale
    full = full.repeat(1, 1) if full.shape != (3, 2) else torch.kron(full, torch.ones(16, 128))
    assert isinstance(found, Tensor)
    assert torch.equal(found, weight.float() * full)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = from_config(
        config(
            "llama", hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=len(bundled_tokenizer())
        )
    )
    model.save_pretrained(tmp_path)
    bundled_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_quantised_folder_is_loaded(method: str, folder: Path) -> None:
    """As the same folder with the plain numbers, twice; and with its weights as they are."""
    name = folder / "model.safetensors"
    whole, stored, plain = load_file(name), {}, {}
    for called, x in whole.items():
        if not called.endswith("_proj.weight"):
            stored[called] = plain[called] = x
            continue
        made = Made(x.shape[0], x.shape[1], 4, 32, None, False)
        base, plain[called] = called.removesuffix(".weight"), made.plain
        parts = {
            "gptq": made.gptq(base),
            "awq": made.awq(base),
            "compressed-tensors": made.compressed(base, False),
        }
        stored |= {part: x.contiguous() for part, x in parts[method].items()}
    save_file(plain, name, {"format": "pt"})
    expected = load(folder)
    save_file(stored, name, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(settings))
    for _ in range(2):
        found = load(folder, weights="bf16")
        for called, x in expected.decoder.reference.state_dict().items():
            assert torch.equal(found.decoder.reference.state_dict()[called], x), called
    held = load(folder)
    ids = list(range(3, 60))
    said, found_says = (run(feed(x.decoder, KVCache(x.decoder, len(ids)), ids)) for x in (expected, held))
    assert torch.allclose(said, found_says, atol=0.01 * float(said.abs().max()))
    assert held.end_tokens == expected.end_tokens
    if widest("pack", torch.float32):
        assert held.weight_bytes < expected.weight_bytes
        damaged = {called: x for called, x in stored.items() if "layers.1.self_attn.k_proj" not in called}
        save_file(damaged, name, {"format": "pt"})
        with pytest.raises(ModelError):
            load(folder)


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(name=str(folder), dtype="float32", device="cpu", **settings))


@pytest.mark.parametrize(
    "about",
    [
        {**GPTQ, "bits": 3},
        {**AWQ, "version": "gemv"},
        *({"quant_method": method} for method in ("bitsandbytes", "hqq", "torchao")),
    ],
)
def test_other_forms_are_refused_by_the_setting(about: dict[str, Any], folder: Path) -> None:
    made = Made(64, 64, 4, 32, 8, False)
    save_file({name: x.contiguous() for name, x in made.gptq("a").items()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": about}))
    with pytest.raises(ModelError) as error:
        load_model(ModelConfig(name=str(folder), device="cpu"))
    assert error.value.setting == "quantization_config"
