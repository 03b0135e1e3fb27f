"""Weights of a folder that GPTQ, AWQ or compressed-tensors quantised: as blocks of GGUF, or dequantised.

Each method stores numbers (code - zero) * scale, with a scale and zero for each group of inputs. They differ in how codes
are packed into words. Blocks of 32 hold them where scales are exact in fp16 and groups are whole blocks: Q4_0 and Q8_0 to
the bit; Q4_1 with its minimum, -zero * scale, rounded to fp16, which is finer than the weights' rounding to bf16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from blendserve.errors import ModelError
from blendserve.models.checkpoint import check_weights
from blendserve.models.gguf_model import ROWS
from blendserve.models.weights import QuantisedMatrix

log = logging.getLogger(__name__)

# Families whose layers are in the decoder, without modules of transformers.
DENSE_TYPES = {row.model_type for row in ROWS.values()} | {"mistral", "olmo3"}
METHODS = {"gptq", "awq", "compressed-tensors"}
BLOCK = 32
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # of the codes in a word
# The tensor by which each method shows a quantised matrix; its other tensors.
MARKS = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_scale"}
OTHERS = {
    *(
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
    ),
    *(
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "output_scale",
        "weight_global_scale",
        "input_global_scale",
    ),
}


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names one of METHODS."""
    about = config.get("quantization_config")
    return isinstance(about, Mapping) and about.get("quant_method") in METHODS


class Codes(NamedTuple):
    """A matrix of numbers (code - zero) * scale."""

    codes: Tensor  # [outputs, inputs], 0 and above
    scales: Tensor  # [outputs, groups]
    zeros: Tensor  # [outputs, groups]
    group_of: Tensor  # of each input
    bits: int

    def dequantise(self) -> Tensor:
        """[outputs, inputs] in fp32."""
        scales, zeros = (part.float()[:, self.group_of.long()] for part in (self.scales, self.zeros))
        return (self.codes - zeros) * scales

    def in_blocks(self) -> QuantisedMatrix | None:
        """The same as blocks of GGUF; None where these cannot hold it."""
        outputs, inputs = self.codes.shape
        firsts = self.group_of[::BLOCK].long()
        scales = self.scales[:, firsts]
        zeros = self.zeros[:, firsts]
        halves = scales.half()
        is_symmetric = bool((self.zeros == 1 << (self.bits - 1)).all())
        if (
            inputs % BLOCK
            or self.bits not in (4, 8)
            or (self.bits == 8 and not is_symmetric)
            or not torch.equal(halves.to(scales.dtype), scales)
            or not torch.equal(firsts.repeat_interleave(BLOCK), self.group_of.long())
        ):
            return None
        codes = self.codes.to(torch.uint8).view(outputs, -1, BLOCK)
        parts = [_bytes(halves)]
        if self.bits == 8:
            kind = "Q8_0"
            packed = codes ^ 128  # as signed bytes
        else:
            kind = "Q4_0" if is_symmetric else "Q4_1"
            packed = codes[..., :16] | codes[..., 16:] << 4
            parts += [] if is_symmetric else [_bytes((-zeros.float() * scales.float()).half())]
        blocks = torch.cat([*parts, packed], dim=-1).view(outputs, -1)
        return QuantisedMatrix(kind, (outputs, inputs), blocks.numpy())


def _bytes(halves: Tensor) -> Tensor:
    """fp16 [outputs, blocks] -> its bytes [outputs, blocks, 2]."""
    return torch.from_numpy(np.ascontiguousarray(halves.numpy())[..., None].view(np.uint8))


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words -> codes, with as many more in this dimension. The first code has the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(dim + 1) >> (shifts.view(-1, 1) if dim == 0 else shifts)) & (1 << bits) - 1
    return codes.flatten(dim, dim + 1)


class QuantisedFolder(Mapping[str, "Tensor | QuantisedMatrix"]):
    """A folder's weights by transformers' names. Each look-up converts one."""

    def __init__(self, folder: Path, about: Mapping[str, Any], keeps_blocks: bool) -> None:
        """about: quantization_config of config.json. keeps_blocks: dequantise only what blocks cannot hold.

        Raises ModelError for a form that is not read.
        """
        self._about = about
        self._method = str(about["quant_method"])
        self._keeps_blocks = keeps_blocks
        self._folder = folder
        self._files: dict[str, Any] = {}  # by the tensors that they hold
        for file in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(file, "pt")
            self._files |= dict.fromkeys(opened.keys(), opened)
        self._marked = {
            name.rpartition(".")[0] for name in self._files if name.endswith(f".{MARKS[self._method]}")
        }
        plain = [name for name in self._files if name.rpartition(".")[2] not in OTHERS]
        self._names = list(dict.fromkeys([*plain, *(f"{base}.weight" for base in self._marked)]))
        self._check()

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor | QuantisedMatrix:
        if not self.is_marked(name):
            return self._tensor(name)
        base = name.removesuffix(".weight")
        stored = self._files.get(name)
        if stored is not None and self._tensor(name).is_floating_point():  # FP8
            return self._scaled(base)
        read = {"gptq": self._gptq, "awq": self._awq, "compressed-tensors": self._compressed_tensors}
        codes = read[self._method](base)
        return (codes.in_blocks() if self._keeps_blocks else None) or codes.dequantise()

    def is_marked(self, name: str) -> bool:
        """Whether these weights are stored quantised."""
        base, _, part = name.rpartition(".")
        return part == "weight" and base in self._marked

    def _check(self) -> None:
        about = self._about
        why = ""
        if not self._marked:
            why = "and none of its weights are"
        elif self._method == "gptq" and about.get("bits") not in (2, 4, 8):
            why = f"with {about.get('bits')} bits, and 2, 4 and 8 are read"
        elif self._method == "awq" and (about.get("bits", 4), about.get("version", "gemm").lower()) != (
            4,
            "gemm",
        ):
            why = (
                f"in the form {about.get('version')!r} with {about.get('bits')} bits, and gemm with 4 is read"
            )
        elif any(name.endswith("_global_scale") for name in self._files):
            why = "in NVFP4, which is not read"
        if why:
            raise ModelError(
                f"{self._folder} says that its weights are quantised by {self._method}, {why}: use the model's "
                "unquantised folder or a GGUF file of it",
                setting="quantization_config",
                path=self._folder,
            )

    def _tensor(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def _groups(self, base: str, part: str, inputs: int, n_groups: int) -> Tensor:
        """Which group each input is of: by order of activation, or one after the other."""
        if f"{base}.{part}" in self._files:
            return self._tensor(f"{base}.{part}")
        return torch.arange(inputs) // -(-inputs // n_groups)

    def _gptq(self, base: str) -> Codes:
        bits = int(self._about["bits"])
        codes = _unpacked(self._tensor(f"{base}.qweight"), bits, 0).T
        zeros = _unpacked(self._tensor(f"{base}.qzeros"), bits, 1).T
        if self._about.get("checkpoint_format", "gptq") == "gptq":  # version 1 stores one less
            zeros = zeros + 1
        scales = self._tensor(f"{base}.scales").T
        return Codes(codes, scales, zeros, self._groups(base, "g_idx", codes.shape[1], scales.shape[1]), bits)

    def _awq(self, base: str) -> Codes:
        codes, zeros = (
            _unpacked(words, 4, 1).view(len(words), -1, 8)[..., AWQ_ORDER].flatten(1).T
            for words in (self._tensor(f"{base}.{part}") for part in ("qweight", "qzeros"))
        )
        scales = self._tensor(f"{base}.scales").T
        return Codes(codes, scales, zeros, self._groups(base, "g_idx", codes.shape[1], scales.shape[1]), 4)

    def _compressed_tensors(self, base: str) -> Codes:
        scales = self._tensor(f"{base}.weight_scale")
        zero = f"{base}.weight_zero_point"
        if f"{base}.weight" in self._files:  # bytes
            codes = self._tensor(f"{base}.weight").int() + 128
            bits = 8
            zeros = self._tensor(zero).int() + 128 if zero in self._files else torch.full(scales.shape, 128)
        else:
            outputs, inputs = (int(n) for n in self._tensor(f"{base}.weight_shape"))
            packed = self._tensor(f"{base}.weight_packed")
            bits = packed.shape[1] * 32 // inputs
            codes = _unpacked(packed, bits, 1)[:, :inputs]
            zeros = torch.full(scales.shape, 1 << (bits - 1))
            if zero in self._files:
                zeros = _unpacked(self._tensor(zero), bits, 0)[:outputs]
        groups = self._groups(base, "weight_g_idx", codes.shape[1], scales.shape[-1])
        scales, zeros = (part.expand(len(codes), -1) for part in (scales, zeros))
        return Codes(codes, scales, zeros, groups, bits)

    def _scaled(self, base: str) -> Tensor:
        """FP8 with a scale for the matrix, each output or each block."""
        weight = self._tensor(f"{base}.weight").float()
        scale = self._tensor(f"{base}.weight_scale").float()
        scale = scale if scale.dim() == 2 else scale.view(-1, 1)
        for dim in (0, 1):
            each = -(-weight.shape[dim] // scale.shape[dim])
            scale = scale.repeat_interleave(each, dim)
        made: Tensor = weight * scale[: weight.shape[0], : weight.shape[1]]
        return made


def read_blocks(
    folder: Path, about: Mapping[str, Any], config: Any, dtype: torch.dtype
) -> dict[str, Tensor | QuantisedMatrix]:
    """A folder's weights, those that blocks cannot hold in this dtype. config: transformers'. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        shapes = {name: tuple(x.shape) for name, x in auto.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    stored = QuantisedFolder(folder, about, keeps_blocks=True)
    weights: dict[str, Tensor | QuantisedMatrix] = {}
    n_dense = 0
    for name in stored:
        x = stored[name]
        n_dense += isinstance(x, Tensor) and stored.is_marked(name)
        weights[name] = x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
    if n_dense:
        log.info("%s: %d matrices are dequantised, as blocks do not hold them", folder, n_dense)
    both = shapes.keys() & weights.keys()
    other = [
        (name, weights[name].shape, shapes[name])
        for name in both
        if tuple(weights[name].shape) != shapes[name]
    ]
    found = {
        "missing_keys": shapes.keys() - both,
        "unexpected_keys": weights.keys() - both,
        "mismatched_keys": other,
    }
    check_weights(found, folder)
    return {name: weights[name] for name in sorted(both)}


def dequantised_model(source: str, config: Any, dtype: torch.dtype) -> Any:
    """transformers' model with plain weights, of a folder or hub id of one of METHODS."""
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    folder = Path(source) if Path(source).is_dir() else Path(snapshot_download(source))
    weights = QuantisedFolder(folder, config.quantization_config, keeps_blocks=False)
    log.info("%s: its weights are dequantised to %s", source, str(dtype).removeprefix("torch."))
    del config.quantization_config
    auto: Any = AutoModelForCausalLM
    with no_init_weights():
        model = auto.from_config(config, dtype=dtype)
    tensors = {name: cast(Tensor, x).to(dtype) for name, x in weights.items()}
    if config.tie_word_embeddings:
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    found = model.load_state_dict(tensors, strict=False, assign=True)
    check_weights({**found._asdict(), "mismatched_keys": ()}, source)
    return model
