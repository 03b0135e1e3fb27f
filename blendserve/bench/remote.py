"""`blendserve bench link`: is KV from a server behind a network quicker than computing it?

A real server, and a link of a given round trip and rate before it. All chunks of a prompt are on the server, by every
codec; the same prompt is prefilled in full beside it, without a server. A request waits for chunks before its prefill
begins: how long is told apart, as are the bytes that came through the link. Method "auto" has seen of a link what an
engine sees when it opens; its first request is told apart.

Throughput is that of requests one after another, of which some are known ahead, as in a server's queue: while one is
computed, the chunks of the next are read (store/ahead.py). It is measured for every round trip at the highest rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from blendserve.bench.config import LinkConfig
from blendserve.bench.figures import Figures, Update, interleaved, ratios, spread
from blendserve.bench.link import Link, Weather
from blendserve.bench.machine import where
from blendserve.bench.servers import Server
from blendserve.bench.tables import Table, ms, plain
from blendserve.bench.watched import Watched
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.blender import Blender
from blendserve.blend.priors import Priors
from blendserve.config import BlendConfig, Config, ValkeyConfig, changed
from blendserve.core import Prompt, TokenIds
from blendserve.engine.calibration import chunks_of, fit
from blendserve.engine.own_words import own_words
from blendserve.errors import InputError
from blendserve.models.loader import Reader, load_reader
from blendserve.registry import CODECS, parse_codec
from blendserve.retrieve import read_documents
from blendserve.store import KVStore, ReadAhead
from blendserve.store.codecs.base import SLOW
from blendserve.store.valkey.store import ValkeyStore
from blendserve.timing import Clock

Say = Callable[[str], None]

DEADLINE_S = 60.0  # of the store: chunks are to arrive, however slow the link
ROOM = 1 << 40
COMPUTED = "computed"
AUTO = " auto"  # behind a codec's word


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, from text to first token."""

    ttft: float  # seconds
    waited: float  # seconds of it until the chunks were here
    n_bytes: int  # from the server


class Scene:
    """A server, a link to it, and a blender over each codec's chunks. A context manager's, see `scene_of`."""

    def __init__(self, reader: Reader, config: LinkConfig, link: Link, say: Say) -> None:
        self._reader, self._config, self._link, self._say = reader, config, link, say
        shape = (config.chunks, config.chunk_tokens, config.suffix_tokens)
        self._workload: Workload = make_workload(reader, *shape, config.seed)
        self._settings = ValkeyConfig(url=link.url, deadline_s=DEADLINE_S)
        self._tables: dict[str, bytes] = {}  # by the name of a codec
        self._blenders: dict[str, Blender] = {}
        self._stores: dict[str, Watched] = {}

    def open(self, stack: ExitStack) -> None:
        """Every codec's chunks onto the server, each in a namespace of its own."""
        for word in self._config.words:
            store = Watched(ValkeyStore(self._settings, ROOM))
            stack.callback(store.close)
            self._write_by(word, store)
            self._stores[word], self._blenders[word] = store, self._blender(word, store)
            self._say(f"Storing the KV of {self._config.chunks} chunks by {word}")
            self._blenders[word].precompute(self._workload.chunks)

    def calls(self) -> dict[str, Callable[[], Request]]:
        """Computing it all, loading by each codec, and what "auto" chooses, which gets to know the link anew."""
        blend, full = self._config.variant.blend, BlendConfig(method="full")
        auto = changed(blend, method="auto")
        found: dict[str, Callable[[], Request]] = {}
        for word, store in self._stores.items():
            blender, anew = self._blenders[word], self._blender(word, store)
            anew.calibrate(self._say)
            anew.warm_up()
            found.setdefault(COMPUTED, partial(self._ask, blender, store, full))
            found[word] = partial(self._ask, blender, store, blend)
            found[word + AUTO] = partial(self._ask, anew, store, auto)
        return found

    def answered_a_second(self) -> dict[str, Callable[[], float]]:
        """By each codec: requests a second, one after another, some known ahead."""
        return {word: partial(self._rate, word) for word in self._stores}

    def _distinct(self) -> list[Prompt]:
        """Prompts of which none shares a chunk with those that are known at the same time."""
        config, asked = self._config, self._workload
        groups = config.in_flight + 1
        many = make_workload(self._reader, groups * config.chunks, config.chunk_tokens, None, config.seed)
        at = [n % groups * config.chunks for n in range(groups + config.requests)]
        return [asked.prompts.build(asked.question, many.passages[i : i + config.chunks]) for i in at]

    def _rate(self, word: str) -> float:
        """Chunks are read for every request: they are kept nowhere. The first requests connect, and do not count."""
        config, blend = self._config, self._config.variant.blend
        with ReadAhead(ValkeyStore(self._settings, ROOM), ROOM) as store:
            blender = self._blender(word, store)
            prompts = self._distinct()
            self._blenders[word].precompute([chunk.ids for prompt in prompts for chunk in prompt.chunks])
            ended = []
            for prompt in prompts[: config.in_flight]:
                blender.prefetch(prompt, blend)
            for n, prompt in enumerate(prompts):
                done = blender.run(prompt, blend)
                if done.report.unusable:
                    raise InputError("chunks did not arrive in time: ask for fewer, or for a higher rate")
                for later in prompts[n + config.in_flight : n + config.in_flight + 1]:
                    blender.prefetch(later, blend)
                ended.append(time.perf_counter())
            return config.requests / (ended[-1] - ended[-1 - config.requests])

    def _blender(self, word: str, store: KVStore) -> Blender:
        prompts = self._workload.prompts
        parts = (self._reader.adapter, self._reader.fingerprint, store, prompts.prefix)
        blender = Blender(*parts, prompts.kv_context, namespace=word)
        blender.priors.use(Priors.of_nothing(self._reader.adapter))
        return blender

    def _ask(self, blender: Blender, store: Watched, blend: BlendConfig) -> Request:
        """Raises InputError where chunks do not arrive."""
        waited, moved = store.seconds, self._link.down.n_bytes
        clock = Clock(self._reader.adapter.device)
        done = blender.run(self._workload.draw(), blend)
        int(done.result.logits.argmax())
        ttft = clock.elapsed()
        if any(unusable.kind != SLOW for unusable in done.report.unusable):
            raise InputError(
                f"{len(done.report.unusable)} chunks did not arrive within {DEADLINE_S:g} s: ask for fewer or smaller "
                "chunks, or for a higher rate"
            )
        return Request(ttft, store.seconds - waited, self._link.down.n_bytes - moved)

    def _write_by(self, word: str, store: Watched) -> None:
        name, level = parse_codec(word)
        made, raw = CODECS.load(name), b""
        if made.needs_tables:
            if name not in self._tables:
                self._say(f"Fitting tables of {name}")
                hash = fit(name, self._text(), self._reader, self._workload.prompts, store)
                self._tables[name] = store.tables(hash) or b""
            raw = self._tables[name]
            store.put_tables(name, self._reader.fingerprint, raw)
        store.write_by(made.with_tables(level, raw))

    def _text(self) -> Sequence[TokenIds]:
        """What tables are fitted on."""
        config = self._config
        if config.text is None:
            return own_words(self._reader, config.fit_tokens)
        return chunks_of(read_documents(config.text), config.fit_tokens, Config(), self._workload.prompts)


def measure(
    config: LinkConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints.

    Raises ConfigError, CorpusError, InputError (also where there is no server to start), ModelError, StoreError.
    """
    reader = load_reader(config.reader, say)
    cells = [(trip, rate) for trip in config.round_trips_ms for rate in config.rates_gbit]
    found = []
    with scene_of(reader, config, say) as (scene, link):
        for done, (trip, rate) in enumerate(cells, start=1):
            link.weather = weather(trip, rate)
            calls = scene.calls()
            calls[COMPUTED]()  # for warmth
            first = {word: calls[word + AUTO]().ttft for word in config.words}
            took = interleaved(calls, config.repeats)
            found.append({"round_trip_ms": trip, "rate_gbit": rate, **_figures(took, first)})
            update(done, len(cells))
        rates = throughput(scene, link, config)
    figures = {"deadline_s": DEADLINE_S, "cells": found, "answered_a_second": rates}
    return {"bench": "link", **where(config, reader), **figures}


def throughput(scene: Scene, link: Link, config: LinkConfig) -> dict[str, Figures]:
    """By codec and round trip in ms, interleaved: a round's share of what the shortest round trip gives."""
    rate, trips = max(config.rates_gbit), sorted(config.round_trips_ms)

    def at(trip: float, measured: Callable[[], float]) -> float:
        link.weather = weather(trip, rate)
        return measured()

    found = {}
    for word, measured in scene.answered_a_second().items():
        took = interleaved({str(trip): partial(at, trip, measured) for trip in trips}, config.repeats)
        nearest = took[str(trips[0])]
        found[word] = {
            trip: {"rate": spread(r), "of_nearest": ratios(r, nearest)} for trip, r in took.items()
        }
    return found


def weather(round_trip_ms: float, rate_gbit: float) -> Weather:
    """Of a network."""
    return Weather(bytes_per_s=rate_gbit * 1e9 / 8, delay_s=round_trip_ms / 2e3)


@contextmanager
def scene_of(reader: Reader, config: LinkConfig, say: Say) -> Iterator[tuple[Scene, Link]]:
    """A server with all chunks, behind a link that is perfect yet; all of it ends here."""
    with ExitStack() as stack:
        server = stack.enter_context(Server())
        link = stack.enter_context(Link(server.port, config.seed))
        scene = Scene(reader, config, link, say)
        scene.open(stack)
        yield scene, link


def _figures(took: dict[str, list[Request]], first: dict[str, float]) -> Figures:
    computed = [request.ttft for request in took[COMPUTED]]
    words = [word for word in took if word + AUTO in took]
    auto = {word: [request.ttft for request in took[word + AUTO]] for word in words}
    return {
        "computed": spread(computed),
        "codecs": {
            word: {
                **_codec(took[word], computed),
                "auto": {
                    "ttft": spread(auto[word]),
                    "of_computed": ratios(auto[word], computed),
                    "first": first[word],
                    "fetched": sum(
                        request.n_bytes > took[word][0].n_bytes / 2 for request in took[word + AUTO]
                    ),
                },
            }
            for word in words
        },
    }


def _codec(requests: list[Request], computed: list[float]) -> Figures:
    ttft = [request.ttft for request in requests]
    return {
        "ttft": spread(ttft),
        "of_computed": ratios(ttft, computed),
        "waited": spread([request.waited for request in requests]),
        "bytes": min(request.n_bytes for request in requests),  # without what "auto" fetched meanwhile
    }


def tables(figures: Figures) -> list[Table]:
    """A row a network and codec."""
    settings, reader = figures["settings"], figures["reader"]
    title = (
        f"{settings['chunks']} chunks of {settings['chunk_tokens']} tokens from a server, {settings['method']}, "
        f"{reader['model']} {reader['dtype']}, {settings['repeats']} rounds; ms (least-most), "
        f"deadline {figures['deadline_s']:g} s"
    )
    columns = (
        "round trip",
        "Gbit/s",
        "codec",
        "TTFT",
        "computed",
        "of computed",
        "waited",
        "MB",
        "auto",
        "of computed",
        "first",
        "fetched",
    )
    rows = [
        (
            f"{cell['round_trip_ms']:g} ms",
            f"{cell['rate_gbit']:g}",
            word,
            ms(found["ttft"]),
            ms(cell["computed"]),
            plain(found["of_computed"]),
            ms(found["waited"]),
            f"{found['bytes'] / 1e6:,.1f}",
            ms(found["auto"]["ttft"]),
            plain(found["auto"]["of_computed"]),
            f"{found['auto']['first'] * 1e3:,.0f}",
            f"{found['auto']['fetched']}",
        )
        for cell in figures["cells"]
        for word, found in cell["codecs"].items()
    ]
    return [(title, columns, rows), _throughput(figures)]


def _throughput(figures: Figures) -> Table:
    settings = figures["settings"]
    title = (
        f"Requests a second, {settings['in_flight']} known ahead, at {max(settings['rates_gbit']):g} Gbit/s, and the "
        f"share of what {min(settings['round_trips_ms']):g} ms give"
    )
    rows = [
        (f"{float(trip):g} ms", word, plain(found["rate"], "{:.2f}"), plain(found["of_nearest"], "{:.3f}"))
        for word, trips in figures["answered_a_second"].items()
        for trip, found in trips.items()
    ]
    return title, ("round trip", "codec", "a second", "of the nearest"), rows
