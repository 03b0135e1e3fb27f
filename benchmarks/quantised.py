"""`python -m benchmarks quantised`: a GGUF file as it is, in bf16 and by llama.cpp, in turns; and what decoding loses.

The file has random weights in the shape of a published model. Each engine is a process of its own. The second table
compares decoded steps with fp32 products of the same file's weights, for bundled models. llama.cpp comes by
llama-cpp-python, as benchmarks/engines.py says; where it is not installed it is left out, and said so.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from pydantic import Field

from benchmarks.engines import LlamaCpp, gguf_file
from benchmarks.support.worker import WorkerProcess
from blendserve import console
from blendserve.bench.decode import prefilled, run_ours, token_s
from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.memory import status_bytes
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.bench.workload import make_workload
from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.blend.layout import lay_out
from blendserve.blend.policies import defaults_for
from blendserve.blend.prefill import PrefillPlan, blend_prefill
from blendserve.config import Arithmetic, BlendConfig, ModelConfig, Positive, Ratio
from blendserve.core import Prompt, TokenIds, run
from blendserve.errors import ConfigError
from blendserve.kernels.packed import KINDS
from blendserve.models.forward import Row
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel, load_model
from blendserve.models.runner import decode_each
from blendserve.store.view import TensorView
from blendserve.timing import Clock


class LlamaOptions(NamedTuple):
    repacks: bool = True
    has_flash: bool = False


OURS, BF16 = "as it is", "bf16"
Engine = Literal[
    "int8 inputs", "bf16", "llama.cpp", "llama.cpp flash", "llama.cpp mapped", "llama.cpp mapped flash"
]
SETTINGS: dict[str, dict[str, Any]] = {
    OURS: {},
    "int8 inputs": {"decode": "int8"},
    BF16: {"weights": "bf16"},
}
LLAMA = {  # mapped: its weights stay in the file's layout
    "llama.cpp": LlamaOptions(),
    "llama.cpp flash": LlamaOptions(has_flash=True),
    "llama.cpp mapped": LlamaOptions(repacks=False),
    "llama.cpp mapped flash": LlamaOptions(repacks=False, has_flash=True),
}
SHAPES = {  # architecture, layers, hidden and inner size, heads, kv heads, dims of a head, vocabulary
    "tiny": ("qwen3", 2, 256, 512, 4, 2, 64, 49_152),
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151_936),
    "qwen3-1.7b": ("qwen3", 28, 2048, 6144, 16, 8, 128, 151_936),
    "llama-3.2-3b": ("llama", 28, 3072, 8192, 24, 8, 128, 128_256),
}
SPEED, FIDELITY = "speed", "fidelity"
INPUTS: tuple[Arithmetic, ...] = "exact", "int8"
SCALE = 2e-4  # of random blocks
Shape = Literal["tiny", "qwen3-0.6b", "qwen3-1.7b", "llama-3.2-3b"]
Kind = Literal["Q4_K_M", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"]


class QuantisedConfig(BenchConfig):
    """Quantised weights as files have them."""

    shape: Shape = Field("qwen3-0.6b", description="Model whose shape the file has.")
    kind: Kind = Field("Q4_K_M", description="Blocks of the file; Q4_K_M is llama.cpp's mixture.")
    beside: tuple[Engine, ...] = Field(
        get_args(Engine), description="Engines that are measured beside the file as it is."
    )
    context: Positive = Field(1024, description="Context length, in tokens, in four chunks.")
    ratio: Ratio = Field(0.15, description="Recompute ratio of the blended prefill.")
    new_tokens: int = Field(32, ge=2, description="Number of tokens to decode.")
    fidelity: tuple[str, ...] = Field(
        ("smollm2-135m",), description="Bundled models whose decoding is compared."
    )
    fidelity_tokens: Positive = Field(192, description="Number of decoded tokens that are compared.")


def groups(config: QuantisedConfig, log: SampleLog) -> Iterator[Group]:
    has_llama = importlib.util.find_spec("llama_cpp") is not None
    if not has_llama:
        console.note("llama-cpp-python is not installed: llama.cpp is left out")
    with scratch(config.folder) as folder:
        file = folder / f"{config.shape}-{config.kind}.gguf"
        write_random(file, config.shape, config.kind)
        n_bytes = file.stat().st_size
        with ExitStack() as stack:
            workers = {OURS: stack.enter_context(WorkerProcess(start, (config, OURS, file)))}
            for engine in config.beside:
                if engine in SETTINGS:
                    workers[engine] = stack.enter_context(WorkerProcess(start, (config, engine, file)))
                elif has_llama:
                    task = config, engine, file, workers[OURS].about
                    workers[engine] = stack.enter_context(WorkerProcess(start_llama, task))
            cases = [Case({"engine": name}, partial(w.call, None)) for name, w in workers.items()]
            yield Group(
                {"about": SPEED, "shape": config.shape, "kind": config.kind},
                cases,
                partial(dict, file_bytes=n_bytes),
            )
        for name in config.fidelity:
            file = gguf_file(name, folder)
            cases = [
                Case({"inputs": inputs}, partial(losses, file, inputs, config.fidelity_tokens))
                for inputs in INPUTS
            ]
            yield Group({"about": FIDELITY, "model": name}, cases, repeats=1, warm_up=False)


def write_random(file: Path, shape: str, kind: str) -> None:
    """Write a file with random blocks, and the bundled model's tokenizer with unused tokens behind it."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType

    arch, layers, hidden, inner, heads, kv_heads, dim, vocabulary = SHAPES[shape]
    given, writer = GGUFReader(gguf_file("smollm2-135m", file.parent)), GGUFWriter(file, arch)
    writer.add_context_length(32_768)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    for field in given.fields.values():
        name, value = field.name, field.contents()
        if name == "tokenizer.ggml.tokens":
            value = [*value, *(f"<unused {i}>" for i in range(len(value), vocabulary))]
        if name == "tokenizer.ggml.token_type":
            value = [*value, *[int(TokenType.UNUSED)] * (vocabulary - len(value))]
        if name.startswith("tokenizer."):
            inside = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, value, field.types[0], sub_type=inside)
    generator = np.random.default_rng(0)
    for name, sizes in _shapes(
        arch, layers, hidden, inner, heads * dim, kv_heads * dim, dim, vocabulary
    ).items():
        if len(sizes) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(sizes, np.float32))
            continue
        blocks = _mixture(name, layers) if kind == "Q4_K_M" else kind
        data = _random_blocks(generator, blocks, sizes)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType[blocks])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(
    arch: str, layers: int, hidden: int, inner: int, q: int, kv: int, dim: int, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, hidden), "output_norm": (hidden,)}
    layer: dict[str, tuple[int, ...]] = {
        **{"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (q, hidden), "attn_k": (kv, hidden)},
        **{"attn_v": (kv, hidden), "attn_output": (hidden, q), "ffn_gate": (inner, hidden)},
        **{"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)},
        **({"attn_q_norm": (dim,), "attn_k_norm": (dim,)} if arch == "qwen3" else {}),
    }
    return found | {f"blk.{l}.{name}": sizes for l in range(layers) for name, sizes in layer.items()}


def _mixture(name: str, layers: int) -> str:
    """What llama.cpp's Q4_K_M chooses: more bits for the embeddings, and in half of the layers for values and `down`."""
    if name == "token_embd":
        return "Q6_K"
    l = int(name.split(".")[1])
    has_more = l < layers // 8 or l >= 7 * layers // 8 or (l - layers // 8) % 3 == 2
    return "Q6_K" if has_more and name.endswith(("attn_v", "ffn_down")) else "Q4_K"


def _random_blocks(generator: Any, kind: str, sizes: tuple[int, ...]) -> Any:
    form = KINDS[kind]
    shape = sizes[0] * sizes[1] // form.inputs, form.n_bytes
    blocks = np.frombuffer(generator.bytes(shape[0] * shape[1]), np.uint8).reshape(shape).copy()
    mean_code = (2 ** sum(form.planes) - 1) / 2
    # Of codes, and of minima. Weights with a mean make a model whose logits change their sign by a rounding.
    factors = SCALE, SCALE * mean_code
    for at, factor in zip({"Q6_K": (208,)}.get(kind, (0, 2)), factors[: 1 + form.has_min], strict=False):
        blocks[:, at : at + 2] = np.array([factor], np.float16).view(np.uint8)
    return blocks.reshape(sizes[0], -1)


def start(task: tuple[QuantisedConfig, str, Path]) -> tuple[TokenIds, Callable[[None], Metrics]]:
    """A worker: the prompt, and the times of a full prefill, a blended one, and a decoded token."""
    config, engine, file = task
    n, memory, clock = config.new_tokens, Memory(file), Clock()
    model = load_model(ModelConfig(name=str(file), threads=_threads(config), **SETTINGS[engine]))
    loaded = {"load_s": clock.elapsed(), **memory.peak()}
    prompt = make_workload(model, 4, config.context // 4, 40, config.seed).prompt
    blend = _blender(model, prompt, config.ratio)

    def measure(_: None) -> Metrics:
        clock = Clock()
        done = prefilled(model.decoder, prompt.ids, n)
        full_s = clock.elapsed()
        clock = Clock()
        blend()
        blended_s = clock.elapsed()
        at = run_ours(model.decoder, done, len(prompt.ids), n)[1]
        times = {"full_s": full_s, "blended_s": blended_s, "token_s": token_s(at)}
        return {**loaded, **times, **memory.now()}

    return prompt.ids, measure


def start_llama(
    task: tuple[QuantisedConfig, str, Path, TokenIds],
) -> tuple[str, Callable[[None], Metrics]]:
    """A worker of llama.cpp."""
    config, name, file, ids = task
    n, memory, clock = config.new_tokens, Memory(file), Clock()
    llama = LlamaCpp(file, len(ids) + n + 1, _threads(config), *LLAMA[name])
    loaded = {"load_s": clock.elapsed(), **memory.peak()}

    def measure(_: None) -> Metrics:
        clock = Clock()
        first = llama.prefill(ids)
        full_s = clock.elapsed()
        at = llama.decode(len(ids), first, n)
        return {**loaded, "full_s": full_s, "token_s": token_s(at), **memory.now()}

    return name, measure


class Memory:
    """What a process takes above what it has now, with the pages that it reads of mapped files."""

    def __init__(self, file: Path) -> None:
        """file: of the model."""
        self._before, self._file_bytes = status_bytes("VmRSS"), file.stat().st_size

    def now(self) -> Metrics:
        return {"memory_bytes": status_bytes("VmRSS") - self._before}

    def peak(self) -> Metrics:
        """The most since the process began."""
        most = status_bytes("VmHWM") - self._before
        return {"peak_bytes": most, "peak_share": most / self._file_bytes}


def _threads(config: QuantisedConfig) -> int:
    return config.threads or os.cpu_count() or 1


def _blender(model: LoadedModel, prompt: Prompt, share: float) -> Callable[[], object]:
    """A blended prefill over stored chunks in memory."""
    computer = ChunkComputer(model.decoder, prompt.prefix)
    stored = computer.compute([chunk.ids for chunk in prompt.chunks])
    layout = lay_out(
        prompt, TensorView(computer.context_kv), {i: TensorView(kv) for i, kv in enumerate(stored)}
    )
    plan = PrefillPlan.of(layout, defaults_for(BlendConfig(method="blend", ratio=share), model.decoder))
    return lambda: run(blend_prefill(model.decoder, plan, KVCache(model.decoder, len(prompt) + 1)))


@torch.inference_mode()
def losses(file: Path, inputs: Arithmetic, n: int) -> Metrics:
    """KL of decoded steps to the file's weights in fp32, and how often both name the same token.

    The steps are behind a prompt's prefix: without the token that begins a text some models give other answers at once.
    """
    exact = load_model(ModelConfig(name=str(file), dtype="float32"))
    try:
        model = load_model(ModelConfig(name=str(file), decode=inputs))
    except ConfigError as error:
        console.note(str(error))
        return {}
    prompt = make_workload(exact, 1, n, None, 0).prompt
    wanted, found = (
        _steps(each, prompt.prefix, prompt.chunks[0].ids).double().log_softmax(-1) for each in (exact, model)
    )
    kl = (wanted.exp() * (wanted - found)).sum(-1)
    same = (wanted.argmax(-1) == found.argmax(-1)).double()
    return {"kl": float(kl.mean()), "largest_kl": float(kl.max()), "same_token": float(same.mean())}


def _steps(model: LoadedModel, prefix: TokenIds, ids: TokenIds) -> torch.Tensor:
    """Logits [n, V] of these tokens behind a prefix, all decoded one after the other."""
    cache = KVCache(model.decoder, len(prefix) + len(ids))
    steps = [decode_each(model.decoder, [Row(cache, at, token)]) for at, token in enumerate((*prefix, *ids))]
    return torch.cat(steps[len(prefix) :])


TABLES = (
    table(
        "A model of quantised weights",
        count("memory MB", "memory_bytes", 1e-6),
        count("peak of loading MB", "peak_bytes", 1e-6),
        count("peak / file", "peak_share", digits=2),
        ms("load ms", "load_s", spread=False),
        ms("full prefill ms", "full_s"),
        ms("blended ms", "blended_s"),
        ms("ms per token", "token_s"),
        ratio("/ bf16", "token_s", engine=BF16),
        ratio("/ llama.cpp", "token_s", engine="llama.cpp"),
        about=SPEED,
    ),
    table(
        "Decoding against fp32",
        count("KL", "kl", digits=5),
        count("largest KL", "largest_kl", digits=5),
        count("same token", "same_token", digits=3),
        about=FIDELITY,
    ),
)
TINY = {
    **{"shape": "tiny", "kind": "Q4_K_M", "context": 240, "new_tokens": 3, "repeats": 1},
    "fidelity_tokens": 8,
}
BENCH = Bench(QuantisedConfig, groups, TABLES, tiny=TINY)
