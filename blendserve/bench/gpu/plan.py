"""What the GPU bench measures, most important first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendserve.registry import BENCHED, POLICIES, RULE

CHUNK, SUFFIX, PREFIX = 512, 40, 32  # tokens
DEVICE, PINNED, STORE = "device", "pinned", "store"  # where stored KV is when a request comes


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt, by every method, with the KV of its chunks in one place."""

    model: str  # a shape of models/shapes.py, or "toy"
    chunks: int
    source: str

    def __str__(self) -> str:
        return f"{self.model}, {self.chunks} chunks, {self.source}"


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one kind, to be checked over random rows."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        more = "".join(f", {n} {x:g}" for n, x in (("window", self.window), ("softcap", self.softcap)) if x)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads}/{self.kv_heads} heads of {self.dim}, {dtype}{more}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run."""

    device: torch.device
    dtype: torch.dtype
    cells: tuple[Cell, ...]
    kinds: tuple[Heads, ...]
    longest: int  # keys of the random rows
    timed: tuple[tuple[Heads, int], ...]  # attention alone: heads, and tokens of the context
    readers: tuple[str, ...]  # that are compared with the CPU
    decoded: tuple[int, ...] = (3112, 16_424)  # contexts behind which the first cell's reader decodes
    new_tokens: int = 64
    ratios: tuple[float, ...] = (0.05, 0.15, 0.3)
    methods: tuple[str, ...] = (RULE, POLICIES.default, f"{BENCHED[0]}@0.15")
    chunk: int = CHUNK
    repeats: int = 3
    matmuls: tuple[int, ...] = (4096, 8192)  # sides, where the machine's best rate is looked for
    copied: int = 1 << 30  # bytes


LLAMA = Heads(32, 8, 128, torch.bfloat16)
QWEN = Heads(28, 4, 128, torch.bfloat16)


def real(device: torch.device) -> Plan:
    """On a GPU: contexts of 3k to 32k."""
    llama, others = "Llama-3.1-8B", ("Mistral-7B", "Qwen2.5-7B")
    cells = (
        *(Cell(llama, n, PINNED) for n in (6, 32)),
        *(Cell(llama, n, source) for source in (DEVICE, STORE) for n in (6, 32)),
        *(Cell(llama, n, PINNED) for n in (16, 63)),
        *(Cell(model, n, PINNED) for model in others for n in (6, 32, 63)),
        *(Cell(model, n, source) for model in others for source in (DEVICE, STORE) for n in (6, 32)),
    )
    kinds = (
        LLAMA,
        Heads(9, 3, 64, torch.bfloat16),
        Heads(16, 8, 256, torch.bfloat16, 300, 30.0),
        Heads(8, 8, 80, torch.float16),
        Heads(8, 2, 64, torch.float32),
    )
    timed = tuple((heads, n) for n in (3072, 16_384, 32_256) for heads in (LLAMA, QWEN))
    return Plan(device, torch.bfloat16, cells, kinds, 2000, timed, ("toy", "smollm2-135m"))


def rehearsal() -> Plan:
    """The same steps on a CPU, small enough for a test."""
    cells = (Cell("toy", 3, STORE), Cell("toy", 4, STORE))
    kinds = (Heads(4, 2, 16, torch.float32), Heads(4, 2, 16, torch.bfloat16, 30, 0.7))
    timed = ((Heads(4, 2, 16, torch.float32), 120),)
    return Plan(
        torch.device("cpu"), torch.float32, cells, kinds, 150, timed, ("toy",),
        decoded=(90,), new_tokens=12, ratios=(0.15,), methods=(RULE, *BENCHED), chunk=30, repeats=1,
        matmuls=(64,), copied=1 << 20,
    )  # fmt: skip
