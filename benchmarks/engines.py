"""`python -m benchmarks engines`: seconds per decoded token by blendserve, transformers and llama.cpp, in turns.

All engines run the same weights: llama.cpp's files are written from the model's own GGUF file, in bf16 and in q8_0. Each
engine is a process with its own threads, which wait while another one is measured. The memory's read rate is measured in
the same rounds, beside the rate at which blendserve reads: a token reads every weight and all KV once.

llama.cpp comes by llama-cpp-python, which blendserve does not need. Build it for this CPU into a folder of its own:

    pip install --target FOLDER --no-deps --no-binary llama-cpp-python llama-cpp-python diskcache
    PYTHONPATH=FOLDER python -m benchmarks engines

On a CPU with AMX build it with GCC 13 or later, or with Clang: GCC 12 drops the set-up of its tiles, and the process ends
with an illegal instruction. --no-llama leaves it out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from pydantic import Field

from benchmarks.support.worker import WorkerProcess
from blendserve.bench.decode import prefilled, run_generate, run_ours, token_s
from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.bench.workload import check_room, make_workload
from blendserve.config import Arithmetic, ModelConfig, Positive
from blendserve.errors import InputError
from blendserve.models.loader import LoadedModel, load_model
from blendserve.models.sources import BUNDLED, bundled_file
from blendserve.timing import Clock

OURS, OURS_INT8, TRANSFORMERS = "blendserve", "blendserve int8", "transformers"
LLAMA = {"llama.cpp bf16": "BF16", "llama.cpp q8_0": "Q8_0"}
MEMORY = "memory read"
READ = 1 << 28  # float32 numbers, 1 GiB: far more than caches hold
BATCH = 512  # tokens of llama.cpp's prefill at a time

Prompted = tuple[tuple[int, ...], int]
"""Token ids, and the number of new tokens"""


class EnginesConfig(BenchConfig):
    """Decoding by several engines."""

    contexts: tuple[Positive, ...] = Field((1024, 3072), description="Context lengths, in tokens.")
    thread_counts: tuple[Positive, ...] = Field((2, 1), description="Numbers of threads per engine.")
    new_tokens: int = Field(64, ge=2, description="Number of tokens to decode.")
    int8: bool = Field(True, description="Measure blendserve with int8 weights, too.")
    llama: bool = Field(True, description="Measure llama.cpp, too.")
    gguf: Path | None = Field(None, description="GGUF file of the model; the bundled model's if not set.")


def groups(config: EnginesConfig, log: SampleLog) -> Iterator[Group]:
    if config.llama and importlib.util.find_spec("llama_cpp") is None:
        raise InputError(
            "llama-cpp-python is not installed: build it as benchmarks/engines.py says, or give --no-llama"
        )
    ours = [OURS, OURS_INT8] if config.int8 else [OURS]
    engines = [*ours, TRANSFORMERS, MEMORY, *(LLAMA if config.llama else ())]
    with scratch(config.folder) as folder:
        files = {name: folder / f"{kind}.gguf" for name, kind in LLAMA.items() if config.llama}
        for name, file in files.items():
            convert(config.gguf or gguf_file(config.model, folder), file, LLAMA[name])
        for threads, context in product(config.thread_counts, config.contexts):
            with ExitStack() as stack:
                tasks = {name: (config, name, context, threads, files.get(name)) for name in engines}
                workers = {n: stack.enter_context(WorkerProcess(_start, task)) for n, task in tasks.items()}
                log.note(model=workers[OURS].about)
                cases = [Case({"engine": name}, partial(w.call, None)) for name, w in workers.items()]
                yield Group({"context": context, "threads": threads}, cases)


def gguf_file(model: str, folder: Path) -> Path:
    """A bundled model's, in this folder. Raises InputError for other models, ModelError for one that is not installed."""
    if model not in BUNDLED:
        raise InputError(f"llama.cpp needs a GGUF file of {model}: give --gguf FILE")
    return bundled_file(model, folder)


def convert(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file with the same weights in bf16 or q8_0; vectors stay float32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    dtype, given = GGMLQuantizationType[kind], GGUFReader(source)
    architecture = given.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for field in given.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in given.tensors:
        weights = quants.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim == 1:
            writer.add_tensor(tensor.name, weights)
            continue
        # our weights are bf16: q8_0 is made of these
        bf16 = torch.from_numpy(weights.copy()).bfloat16().float().numpy()
        writer.add_tensor(tensor.name, quants.quantize(bf16, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _start(
    task: tuple[EnginesConfig, str, int, int, Path | None],
) -> tuple[str, Callable[[None], Metrics]]:
    config, engine, context, threads, file = task
    n, numbers = config.new_tokens, torch.ones(READ if engine == MEMORY else 0)
    decode: Arithmetic = "int8" if engine == OURS_INT8 else "exact"
    model = load_model(ModelConfig(name=config.model, threads=threads, decode=decode))
    check_room(model, context + n, "the context with its new tokens")
    ids = make_workload(model, 1, context, None, config.seed).chunks[0]
    done = prefilled(model.decoder, ids, n)
    llama = _llama(str(file), ids, n, threads) if file else None
    n_bytes = _bytes(model, context) if engine == OURS else 0

    def run(_: None) -> Metrics:
        if engine == MEMORY:
            clock = Clock()
            numbers.sum()
            return {"gb_per_s": numbers.nbytes / clock.elapsed() / 1e9}
        if engine == TRANSFORMERS:
            at = run_generate(model.decoder, ids, n)[1]
        else:
            at = llama() if llama else run_ours(model.decoder, done, context, n)[1]
        seconds = token_s(at)
        return {"token_s": seconds, **({"gb_per_s": n_bytes / seconds / 1e9} if n_bytes else {})}

    return model.name, run


def _llama(file: str, ids: tuple[int, ...], n: int, threads: int) -> Callable[[], tuple[float, ...]]:
    """Greedy decoding after a context that is prefilled once -> the time of each token."""
    llama = LlamaCpp(Path(file), len(ids) + n + 1, threads)
    first = llama.prefill(ids)
    return lambda: llama.decode(len(ids), first, n)


class LlamaCpp:
    """A model of llama-cpp-python, with room for this many tokens."""

    def __init__(
        self, file: Path, room: int, threads: int, repacks: bool = True, has_flash: bool = False
    ) -> None:
        """repacks: weights into llama.cpp's own layouts where it has some. has_flash: its flash attention runs."""
        library = importlib.import_module("llama_cpp.llama_cpp")
        parameters = library.llama_model_default_params()
        parameters.use_extra_bufts = repacks  # which the class has no argument for
        about = {"n_threads": threads, "n_threads_batch": threads, "flash_attn": has_flash, "verbose": False}
        with patch.object(library, "llama_model_default_params", lambda: parameters):
            make = importlib.import_module("llama_cpp").Llama
            self._llama = make(str(file), n_ctx=room, n_batch=BATCH, **about)

    def prefill(self, ids: tuple[int, ...]) -> int:
        """From nothing -> the first token."""
        self._llama.reset()
        return self._next(ids)

    def decode(self, context: int, token: int, n: int) -> tuple[float, ...]:
        """The time of each of n tokens behind a context of that length, `token` the first. Later KV is overwritten."""
        self._llama.n_tokens = context
        clock, at = Clock(), [0.0]
        for _ in range(n - 1):
            token = self._next((token,))
            at.append(clock.elapsed())
        return tuple(at)

    def _next(self, ids: tuple[int, ...]) -> int:
        self._llama.eval(ids)
        return int(self._llama.sample(temp=0.0))


def start_generator(
    task: tuple[ModelConfig, Path | None],
) -> tuple[str, Callable[[Prompted], tuple[float, ...]]]:
    """A worker process: (token ids, number of new tokens) -> the time of each, of llama.cpp if there is a file."""
    settings, file = task
    model = load_model(settings)
    if file is None:
        return model.name, lambda asked: run_generate(model.decoder, *asked)[1]
    llama = LlamaCpp(file, model.decoder.context_limit, settings.threads or 1)

    def generate(asked: Prompted) -> tuple[float, ...]:
        (ids, n), clock = asked, Clock()
        first, ttft_s = llama.prefill(ids), clock.elapsed()
        return tuple(ttft_s + at for at in llama.decode(len(ids), first, n))

    return model.name, generate


def _bytes(model: LoadedModel, context: int) -> int:
    """Bytes that a decoded token reads: all weights (tied ones once) and the context's KV."""
    weights = {p.data_ptr(): p.nbytes for p in model.decoder.reference.parameters()}
    return sum(weights.values()) + context * model.decoder.kv_bytes_per_token


TABLE = table(
    "Decoding",
    ms("ms per token", "token_s"),
    ratio("/ transformers", "token_s", engine=TRANSFORMERS),
    *(ratio(f"/ {name}", "token_s", engine=name) for name in LLAMA),
    Column("GB/s", "gb_per_s"),
)
TINY = {
    **{"contexts": (60,), "thread_counts": (1,), "new_tokens": 3, "repeats": 1},
    **{"int8": False, "llama": False},
}
BENCH = Bench(EnginesConfig, groups, (TABLE,), tiny=TINY)
