"""One prompt, and what runs it: transformers' own forward, or a blender over a real store.

`run` reads the clock from the text of question and passages to the first token, its argmax included; prefill is the part
from token ids to first-token logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import Tensor
from torch.nn.attention import sdpa_kernel

from blendserve.bench.harness import Metrics
from blendserve.bench.page_cache import drop
from blendserve.bench.roofline import Counts, Rates, bound_s, prefill_work
from blendserve.bench.workload import Workload
from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.priors import Priors
from blendserve.config import BlendConfig, KVContext, PromptConfig, StoreConfig
from blendserve.core import TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError, StoreError
from blendserve.evaluate.methods import FULL, TRANSFORMERS, MethodSpec
from blendserve.fetch import open_storage
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.reference import OwnDecoding
from blendserve.quality.fidelity import kl
from blendserve.store import KVStore
from blendserve.timing import Clock

SPARE_BYTES = 1 << 24  # of a store's cap, above its chunks
PINNED = 1.3  # times the bytes of a tier: pinned memory is allocated in powers of two
STAGES = ("load", "select", "correct")
Tier = Literal["disk", "host", "device"]


class PromptFixture:
    """A model, a workload and a store in `folder` for its chunks. A context manager."""

    def __init__(
        self,
        model: LoadedModel,
        workload: Workload,
        methods: Sequence[MethodSpec],
        folder: Path,
        tier: Tier = "disk",
        rates: Rates | None = None,
    ) -> None:
        """tier: memory that holds the chunks when a request comes. rates: with them, `run` also gives the KL of the first
        token to transformers', and the share of the roofline. Raises StoreError.
        """
        self.model = model
        self.workload = workload
        self._folder = folder
        self._tier = tier
        self._contexts = list(dict.fromkeys(method.kv_context for method in methods))
        self._rates = rates
        self._counts = Counts.of(model.decoder) if rates else None
        self._reference = forward(model.decoder, workload.prompt.ids).float() if rates else None
        self._open()

    def precompute(self) -> None:
        """Store what every method reads. Raises StoreError."""
        for blender in self._blenders.values():
            blender.writer.precompute(self.workload.chunks)

    def run(self, method: MethodSpec) -> Metrics:
        """Measure a method from text to first token. Raises StoreError when a chunk is not in the store."""
        if method.kind == TRANSFORMERS:
            return self._run_transformers()
        metrics, done = time_prompt(self.blender(method), self.workload, method.blend)
        if done.missing:
            raise StoreError(f"{len(done.missing)} of the bench's own chunks are not in its store")
        metrics |= self._fidelity(done.result.logits)
        if self._counts and self._rates:
            work = prefill_work(self._counts, done.report, done.result.recomputed, method.blend)
            metrics["roofline_s"] = bound_s(work, self._rates)
            metrics["roofline_fraction"] = metrics["roofline_s"] / metrics["prefill_s"]
        return metrics

    def drop_page_cache(self) -> None:
        """Drop the store's file from the page cache, and open it again. Raises InputError where that fails."""
        self.store.close()
        trouble = drop(self._folder / "data.mdb")
        self._open()
        if trouble:
            raise InputError(trouble)

    def __enter__(self) -> PromptFixture:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def _open(self) -> None:
        decoder = self.model.decoder
        n_bytes = len(self._contexts) * len(self.workload.prompt) * decoder.kv_bytes_per_token + SPARE_BYTES
        copies: dict[str, int] = {}
        if self._tier != "disk":
            n_bytes = round(PINNED * n_bytes)
            copies = {"device_bytes": n_bytes} if self._tier == "device" else {"memory_bytes": 2 * n_bytes}
        settings = {"location": str(self._folder), "cap_gb": n_bytes / 1e9, **copies}
        self.store, fetcher = open_storage(StoreConfig.model_validate(settings), None, decoder.device)
        self._blenders: dict[KVContext, Blender] = {}
        for context in self._contexts:
            prompts = PromptBuilder(self.model.tokenizer, PromptConfig(), context)
            self._blenders[context] = make_blender(self.model, prompts, self.store, fetcher=fetcher)

    def blender(self, method: MethodSpec) -> Blender:
        """The blender that runs a method."""
        return self._blenders[method.kv_context]

    def _run_transformers(self) -> dict[str, float]:
        """The model's own forward as its user calls it: a dynamic cache, SDPA, logits of the last token alone."""
        decoder = self.model.decoder
        clock = Clock(decoder.device)
        ids = self.workload.draw().ids
        with clock.stage("prefill"):
            logits = forward(decoder, ids)
        int(logits.argmax())
        times = {"ttft_s": clock.elapsed(), "prefill_s": clock.seconds["prefill"]}
        return {**times, "kv_bytes": len(ids) * decoder.kv_bytes_per_token, **self._fidelity(logits)}

    def _fidelity(self, logits: Tensor) -> dict[str, float]:
        if self._reference is None:
            return {}
        same = bool(self._reference.argmax() == logits.argmax())
        divergence = kl(self._reference[None], logits.float()[None])[0]
        return {"kl_first_token": divergence, "same_first_token": float(same)}


def time_prompt(
    blender: Blender, workload: Workload, blend: BlendConfig
) -> tuple[dict[str, float], Prefilled]:
    """Time a prompt from text to first token -> seconds and counts, and what the blender returned."""
    clock = Clock(blender.model.device)
    prompt = workload.draw()
    with clock.stage("prefill"):
        done = blender.run(prompt, blend, clock=clock)
    int(done.result.logits.argmax())
    ttft_s = clock.elapsed()
    report = done.report
    metrics = {
        "ttft_s": ttft_s,
        "prefill_s": clock.seconds["prefill"],
        **{f"{stage}_s": clock.seconds[stage] for stage in STAGES},
        "read_s": done.result.read_s,  # most of it while layers ran
        "tokens_run": report.tokens_computed + report.tokens_recomputed + report.tokens_suffix,
        "tokens_recomputed": report.tokens_recomputed,
        "cost": report.cost,
        "ratio": report.ratio,
        "bytes_loaded": report.bytes_loaded,
        "kv_bytes": done.result.cache.n_bytes,
    }
    return metrics, done


def make_blender(model: LoadedModel, prompts: PromptBuilder, store: KVStore, **options: Any) -> Blender:
    """Make a blender with a prior of zeros: a method that uses a prior needs its time for any."""
    about = model.decoder, model.fingerprint, store, prompts.prefix, prompts.kv_context
    blender = Blender(*about, tokenizer=model.tokenizer, **options)
    blender.priors.use(Priors.of_nothing(model.decoder))
    return blender


def forward(decoder: DecoderModel, ids: TokenIds) -> Tensor:
    """The model's own forward over these tokens, with a cache -> logits [V] after the last."""
    from blendserve.kernels.sdpa import GPU_BACKENDS

    with sdpa_kernel(GPU_BACKENDS) if decoder.device.type == "cuda" else nullcontext():
        return OwnDecoding(decoder).feed(ids)


def reads_store(method: MethodSpec) -> bool:
    return method.kind not in (TRANSFORMERS, FULL)


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """A new folder in `parent`, which is made if need be; it is removed at the end. Raises InputError."""
    try:
        if parent:
            parent.mkdir(parents=True, exist_ok=True)
        made = TemporaryDirectory(prefix="blendserve-bench-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise InputError(
            f"cannot create a folder in {parent}: {error.strerror}; give another --folder"
        ) from None
    with made as folder:
        yield Path(folder)
