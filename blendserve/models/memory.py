"""How much memory a model and its KV caches take, computed before it is taken."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from blendserve import machine
from blendserve.errors import ModelError

PACKED = ".qweight", ".weight_packed"  # eight numbers a word, which are dequantised
MAX_HEAD = 100_000_000  # bytes, as in safetensors
# Numbers that are read into the model's dtype, by safetensors' names. Others stay as they are.
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


def available_on(device: torch.device) -> int:
    """Bytes that are free where a model on this device has its weights and KV."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else machine.available_memory()


def weight_bytes(folder: Path, dtype: torch.dtype, has_int8_copy: bool = False) -> int:
    """Bytes of a folder's weights in this dtype, by the heads of its safetensors files; 0 if it has none.

    has_int8_copy: they are decoded with an int8 copy. Raises OSError, ValueError for a damaged file.
    """
    total = 0
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            head = json.loads(opened.read(min(length, MAX_HEAD)))
        for name, about in head.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                numbers = math.prod(about["shape"]) * (8 if name.endswith(PACKED) else 1)
                total += (
                    numbers * dtype.itemsize
                    if about["dtype"] in FLOATS or name.endswith(PACKED)
                    else end - begin
                )
                total += numbers if has_int8_copy else 0
    return total


def check_fits(name: str, n_bytes: int, available: int) -> None:
    """Raise ModelError, with the way out, for weights that take more memory than there is."""
    if n_bytes > available:
        raise ModelError(
            f"the weights of model {name!r} take {_mb(n_bytes)} of memory, and {_mb(available)} are available: "
            "use a smaller model or a machine with more. model.dtype bfloat16 takes half of float32, and "
            "model.decode int8 adds a copy",
            setting="model.name",
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a server takes, in bytes."""

    weights: int
    slots: int
    slot_tokens: int
    kv: int  # of all slots
    conversations: int  # at most
    shared: int  # at most, of chunks that several queued prompts load
    others: int  # at most, of chunks that are kept decoded or prefetched

    def __str__(self) -> str:
        copies = self.conversations + self.shared + self.others
        return (
            f"weights {_mb(self.weights)}, KV of {self.slots} slots of {self.slot_tokens:,} tokens {_mb(self.kv)}, "
            f"copies of chunks and conversations at most {_mb(copies)}"
        )


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 10**6:,.0f} MB"
