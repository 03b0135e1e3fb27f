"""`blendserve bench delivery`: a prompt whose chunks a service delivers, over links that are constant, change, or die.

A real service, and before it a link that plays a trace from the beginning of each request, in processes of their own.
Compared, interleaved over the same trace: computing everything (text), each level fixed, CacheGen's way, its rule in our
way, and ours. CacheGen's way is its paper's (SIGCOMM 2024, section 5.3): one chunk after the other, decoded while others
come, and a prefill that begins when all are here. Our way has two under way, and begins while the last ones come; so do
fixed levels. Ours asks for all in one call where their layers can come in step with the prefill. What every prompt begins
with is kept by everybody.
Best in hindsight is the quickest of text and the fixed levels in that very round. Each request has a new store, connected
beforehand, that knows of decoding what an engine measures when it opens, and of the link what those before it have learnt
on this trace; one round is for learning.

KL: of the first token's logits, from full prefill's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import yaml
from torch import Tensor

from blendserve.bench.config import DeliveryConfig
from blendserve.bench.figures import Figures, Update, interleaved, ratios, spread
from blendserve.bench.harness import scratch
from blendserve.bench.link_process import LinkProcess
from blendserve.bench.machine import where
from blendserve.bench.tables import Table, ms, plain
from blendserve.bench.traces import Trace, changing, constant, played
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, KdnConfig, changed
from blendserve.delivery.catalogue import Catalogue
from blendserve.delivery.publish import LevelCoder, describe
from blendserve.engine.calibration import fit
from blendserve.engine.own_words import own_words
from blendserve.errors import ConfigError
from blendserve.evaluate.fidelity import kl
from blendserve.models.loader import Reader, load_reader
from blendserve.registry import CODECS, DELIVERED, STORES, parse_codec
from blendserve.serve.child import Child
from blendserve.store import KVStore, LMDBStore, MemoryStore
from blendserve.store.base import TimeSaved
from blendserve.store.codecs.base import Codec
from blendserve.store.kdn.adapt import TEXT as RECOMPUTE
from blendserve.store.kdn.adapt import Offer, Rule, Situation, fixed, quickest
from blendserve.store.kdn.collection import Entry
from blendserve.store.kdn.pace import Pace
from blendserve.store.kdn.store import WORKERS, KdnStore
from blendserve.timing import Clock

Say = Callable[[str], None]

NAME = "bench"
TEXT, CACHEGEN, ITS_RULE, OURS, HINDSIGHT = (
    "text",
    "CacheGen's",
    "CacheGen's rule, our way",
    "ours",
    "hindsight",
)
ROOM = 1 << 36


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, from text to first token."""

    ttft: float
    n_bytes: int  # through the link
    kl: float
    computed: int  # chunks that did not come


@dataclass(frozen=True, slots=True)
class Contestant:
    """How chunks are had."""

    rule: Rule
    blend: BlendConfig
    workers: int = WORKERS
    early: bool = True


class Scene:
    """A published prompt, and a link to who delivers it."""

    def __init__(self, reader: Reader, config: DeliveryConfig, link: LinkProcess, workload: Workload) -> None:
        self._reader, self._config, self._link, self._workload = reader, config, link, workload
        self._paces: dict[str, Pace] = {}
        self._blenders: dict[str, Blender] = {}  # the first of each: what is known of a link is kept
        full = self._blender(MemoryStore(ROOM)).run(workload.draw(), BlendConfig(method="full"))
        self._reference: Tensor = full.result.logits.float()

    def calls(self, trace: Trace) -> dict[str, Callable[[], Request]]:
        """Everybody, over this trace, knowing nothing of it yet but what decoding takes."""
        self._paces.clear()
        self._blenders.clear()
        blend = self._config.variant.blend
        everybody = {word: Contestant(fixed(word), blend) for word in self._config.words}
        everybody[CACHEGEN] = Contestant(cachegen_rule, blend, workers=1, early=False)
        everybody[ITS_RULE] = Contestant(cachegen_rule, blend)
        everybody[OURS] = Contestant(quickest, changed(blend, method="auto"))
        found = {name: partial(self._delivered, trace, name, who) for name, who in everybody.items()}
        return {TEXT: self._computed, **found}

    def _computed(self) -> Request:
        return self._timed(self._blender(MemoryStore(ROOM)), BlendConfig(method="full"))

    def _delivered(self, trace: Trace, name: str, who: Contestant) -> Request:
        config = KdnConfig(
            url=f"http://127.0.0.1:{self._link.port}", collection=NAME, deadline_s=self._config.deadline_s
        )
        new = name not in self._paces
        pace = self._paces.setdefault(name, Pace())
        prompt, teller = self._workload.prompt, self._blender(MemoryStore(ROOM))
        # The rules of fixed methods compare it as well, though their requests do not say it.
        per_token, of_prefix = teller.time_saved(prompt, who.blend, range(len(prompt.chunks)))
        saved = TimeSaved(per_token, {teller.key(prompt.prefix, ()): of_prefix})
        with KdnStore(config, who.rule, who.workers, pace, who.early, saved) as store:
            list(store.keys())  # connects, and reads the directory
            blender = self._blender(store) if new else self._blenders[name].like(store, "")
            if new:
                self._blenders[name] = blender
                with self._played(trace.beginning):
                    blender.warm_up()
            blender.calibrate()
            with self._played(trace):
                request = self._timed(blender, who.blend)
                blender.fetcher.wait()  # which belongs to this link, and not beside who comes next
                return request

    def _played(self, trace: Trace) -> AbstractContextManager[None]:
        return played(trace, self._link, self._config.round_trip_ms / 1e3)

    def _timed(self, blender: Blender, blend: BlendConfig) -> Request:
        moved, clock = self._link.n_bytes, Clock(self._reader.adapter.device)
        done = blender.run(self._workload.draw(), blend)
        int(done.result.logits.argmax())
        ttft = clock.elapsed()
        distance = kl(self._reference[None], done.result.logits.float()[None])[0]
        came = done.report.tiers.get("remote", 0)
        return Request(ttft, self._link.n_bytes - moved, distance, done.report.chunks - came)

    def _blender(self, store: KVStore) -> Blender:
        prompts = self._workload.prompts
        return Blender(
            self._reader.adapter, self._reader.fingerprint, store, prompts.prefix, prompts.kv_context
        )


def cachegen_rule(offers: Sequence[Offer], now: Situation, going_on: str | None = None) -> str:
    """CacheGen's level of a chunk (SIGCOMM 2024, section 5.3): chosen before it is sent, by the last chunk's throughput.

    The finest level that arrives in time, else the fastest; the middle one for the first chunk. Decoding is not counted.
    """
    if going_on is not None:
        return going_on
    levels = [offer for offer in offers if offer.word != RECOMPUTE]
    if now.last_bytes_per_s is None:
        return levels[len(levels) // 2].word if levels else RECOMPUTE
    rate, room = now.last_bytes_per_s, (now.wanted - now.spent) * now.share
    seconds = {o.word: o.seconds if o.word == RECOMPUTE else o.n_bytes / rate for o in offers}
    in_time = [word for word, needed in seconds.items() if needed <= room]
    return in_time[0] if in_time else min(seconds, key=lambda word: seconds[word])


def measure(
    config: DeliveryConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ConfigError, InputError, ModelError, StoreError."""
    traces = traces_of(config)
    reader = load_reader(config.reader, say)
    cells, rounds = [], config.repeats + 1
    with scene_of(reader, config, say) as scene:
        for n, trace in enumerate(traces):
            took = interleaved(
                scene.calls(trace),
                config.repeats,
                lambda done, _, n=n: update(n * rounds + done, len(traces) * rounds),  # type: ignore[misc]
            )
            cells.append({"trace": trace.name, "changes": trace.changes, **_figures(took)})
    return {"bench": "delivery", **where(config, reader), "cells": cells}


def traces_of(config: DeliveryConfig) -> list[Trace]:
    """Constant ones first. Raises ConfigError."""
    known = changing(config.seed)
    for name in config.traces:
        if name not in known:
            raise ConfigError(f"there is no trace {name!r}: known are {', '.join(known)}")
    return [*map(constant, config.rates_gbit), *(known[name] for name in config.traces)]


@contextmanager
def scene_of(reader: Reader, config: DeliveryConfig, say: Say) -> Iterator[Scene]:
    """A service with all chunks at all levels behind a link; all of it ends here."""
    shape = (config.chunks, config.chunk_tokens, config.suffix_tokens)
    workload = make_workload(reader, *shape, config.seed)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch(config.folder))
        with LMDBStore(folder / "kv", ROOM) as store:
            _publish(reader, config, workload, store, say)
        settings = folder / "kdn.yaml"
        about = {
            "store": {"kind": STORES.default, "path": str(folder / "kv")},
            "deliver": {"memory_mb": 4096},
        }
        settings.write_text(yaml.safe_dump(about))
        command = [sys.executable, "-m", "blendserve", DELIVERED, "serve", "--port", "0", "-c", str(settings)]
        service = stack.enter_context(Child(command, folder / "service.log"))
        link = stack.enter_context(LinkProcess(int(service.url.rpartition(":")[2]), config.seed))
        yield Scene(reader, config, link, workload)


def _publish(reader: Reader, config: DeliveryConfig, workload: Workload, store: KVStore, say: Say) -> None:
    """The prompt's chunks at every level, without an index."""
    prompts, words = workload.prompts, config.words
    blender = Blender(reader.adapter, reader.fingerprint, store, prompts.prefix, prompts.kv_context)
    say(f"Publishing {config.chunks} chunks at {', '.join(words)}")
    blender.precompute(workload.chunks)
    prefix = blender.key(prompts.prefix, ())
    coder = LevelCoder(store, words, _codecs(reader, config, workload, store, say), prefix)
    tokens = {prefix: len(prompts.prefix), **{blender.key(ids): len(ids) for ids in workload.chunks}}
    directory = {key: Entry(n, tuple(coder.sizes(key))) for key, n in tokens.items()}
    about = (reader.name, reader.fingerprint)
    Catalogue(store).write(describe(store, NAME, about, prefix[:8], words, directory, coder.tables, {}))


def _codecs(
    reader: Reader, config: DeliveryConfig, workload: Workload, store: KVStore, say: Say
) -> dict[str, Codec]:
    """Of every level but the first, those of one codec with the same tables."""
    raw: dict[str, bytes] = {}
    found = {}
    for word in config.words[1:]:
        name, level = parse_codec(word)
        made = CODECS.load(name)
        if made.needs_tables and name not in raw:
            say(f"Fitting tables of {name}")
            hash = fit(name, own_words(reader, config.fit_tokens), reader, workload.prompts, store)
            raw[name] = store.tables(hash) or b""
        found[word] = made.with_tables(level, raw.get(name, b""))
    return found


def _figures(took: Mapping[str, list[Request]]) -> Figures:
    """Of everybody, against text, CacheGen's way and its rule in ours, and the best in hindsight."""
    seconds = {name: [request.ttft for request in requests] for name, requests in took.items()}
    could = [name for name in took if name not in (CACHEGEN, ITS_RULE, OURS)]
    hindsight = [min(rounds) for rounds in zip(*(seconds[name] for name in could), strict=True)]
    found = {
        name: {
            "ttft": spread(seconds[name]),
            "of_text": ratios(seconds[name], seconds[TEXT]),
            "of_cachegen": ratios(seconds[name], seconds[CACHEGEN]),
            "of_its_rule": ratios(seconds[name], seconds[ITS_RULE]),
            "of_hindsight": ratios(seconds[name], hindsight),
            "bytes": spread([float(request.n_bytes) for request in requests]),
            "kl": spread([request.kl for request in requests]),
            "computed": spread([float(request.computed) for request in requests]),
        }
        for name, requests in took.items()
    }
    return {"contestants": found, HINDSIGHT: spread(hindsight)}


def tables(figures: Figures) -> list[Table]:
    """A row a trace and contestant."""
    settings, reader = figures["settings"], figures["reader"]
    title = (
        f"{settings['chunks']} chunks of {settings['chunk_tokens']} tokens delivered, {settings['method']}, round trip "
        f"{settings['round_trip_ms']:g} ms, {reader['model']} {reader['dtype']}, {settings['repeats']} rounds; "
        "ms (least-most), times as long as"
    )
    columns = ("link", "chunks by", "TTFT", TEXT, CACHEGEN, ITS_RULE, HINDSIGHT, "MB", "KL", "computed")
    rows = [
        (
            cell["trace"],
            name,
            ms(found["ttft"]),
            *(plain(found[against]) for against in ("of_text", "of_cachegen", "of_its_rule", "of_hindsight")),
            f"{found['bytes']['median'] / 1e6:,.1f}",
            f"{found['kl']['median']:.3f}",
            f"{found['computed']['median']:g}",
        )
        for cell in figures["cells"]
        for name, found in cell["contestants"].items()
    ]
    return [(title, columns, rows)]
