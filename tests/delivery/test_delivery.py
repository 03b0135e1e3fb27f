"""From a published index to an engine's answer, over real sockets; and what publishing keeps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.proxy import LinkConditions, Proxy
from blendserve.blend import priors
from blendserve.config import BlendConfig, RemoteConfig, StoreConfig
from blendserve.core import Prompt
from blendserve.engine import codec_fit
from blendserve.engine.engine import Engine
from blendserve.errors import InputError, NotFound, StoreUnavailable
from blendserve.fetch import KVFetcher, open_store
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.kdn.manifest import Collection, level_key, read_directory, valid_name
from blendserve.fetch.kdn.source import KdnSource
from blendserve.fetch.layers import Layer, LayerReader
from blendserve.fetch.plan import LinkState, PendingChunk, Plan
from blendserve.kdn.catalog import CollectionCatalog
from blendserve.kdn.publish import publish, set_pins, unpublish
from blendserve.kdn.pull import pull, resolve
from blendserve.models import sources
from blendserve.retrieve import read_manifest
from blendserve.store import ChunkKey, KVStore, MemoryStore
from blendserve.store.key import KEY_BYTES, TAG_BYTES
from tests.support import peers
from tests.support.engines import CONFIG
from tests.support.engines import toy_model as model
from tests.support.http import DOCUMENTS, certificate
from tests.support.links import Known
from tests.support.peers import LEVELS, NAME, Service, answered, blender, check, kdn_store, settings
from tests.support.waiting import ManualClock, eventually

Made = tuple[KVStore, Collection]


@pytest.mark.parametrize(
    ("policy", "method"), [("query", "blend"), ("deviation", "blend"), ("query", "auto")]
)
def test_a_prefill_asks_for_a_layer_before_the_peer_sends_it(
    service: Service, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, policy: Any, method: Any
) -> None:
    """Of the last two chunks, which come at a time; over a fast link of all of them, interleaved in one request."""
    is_auto, in_time, take = method == "auto", list[bool](), LayerReader.take
    asked_for = [threading.Event() for _ in range(model().decoder.n_layers)]
    late = [blender(MemoryStore(1)).key(c.ids) for c in prompt.chunks[0 if is_auto else -2 :]]

    def noted(self: LayerReader, l: int) -> Layer:
        asked_for[l].set()
        return take(self, l)

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key in late and l >= 0:
            in_time.append(asked_for[l].wait(peers.PATIENT_S / 2))

    monkeypatch.setattr(LayerReader, "take", noted)
    blend, link = BlendConfig(method=method, policy=policy), Known(1e6) if is_auto else None
    with peers.delivered(service, before, link=link) as (store, paced):
        check(blender(store, costs=peers.SLOW).run(prompt, blend), prompt, blend)
    assert in_time == [True] * len(asked_for) * len(late)
    assert set(paced.asked.values()) == {1}
    assert paced.most_at_once == (len(late) if is_auto else 1)


def test_a_chunk_in_transit_comes_anew_at_another_level(service: Service, prompt: Prompt) -> None:
    """The planner changes it after the first layer of every chunk, once."""

    def planner(todo: Sequence[PendingChunk], link: LinkState, now: str | None) -> Plan:
        return Plan("int8" if now else "raw", len(todo))

    with peers.delivered(service, config={"level": "auto"}) as (store, paced):
        fetcher = KVFetcher(store, planner=planner)
        check(blender(store, fetcher=fetcher).run(prompt, peers.BLEND), prompt, level="int8")
    assert set(paced.asked.values()) == {2}


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_connection_that_is_cut_is_resumed(
    service: Service, made: Made, prompt: Prompt, interleaved: bool
) -> None:
    """Each lets less than one chunk pass, or less than all interleaved ones: only the rest is asked for again."""
    n_bytes = [entry.bodies[interleaved] for entry in CollectionCatalog(made[0]).directory(made[1]).values()]
    level, blend = LEVELS[interleaved], peers.BLEND.with_values(method="auto" if interleaved else "blend")
    with Proxy(service.port) as link:
        config = settings(f"http://127.0.0.1:{link.port}", level=level)
        with kdn_store(config, peers.Unprobed, link=Known(1e6)) as store:
            store.source.contains([])
            before = link.down.n_bytes
            link.conditions = LinkConditions(
                close_after=(sum(n_bytes) if interleaved else max(n_bytes)) * 2 // 3
            )
            check(blender(store, costs=peers.SLOW).run(prompt, blend), prompt, blend, level)
            assert sum(n_bytes) < link.down.n_bytes - before < 1.5 * sum(n_bytes)


def test_the_corpus_prior_is_delivered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priors, "MIN_TOKENS", 1)
    monkeypatch.setattr(priors, "CHUNKS_PER_PROMPT", 2)
    store, _ = peers.published(tmp_path)
    with Service(store) as running, kdn_store(settings(running.url)) as far:
        there, here = answered(far), answered(store)
    assert there.report.prior
    assert torch.equal(there.result.logits, here.result.logits)


@pytest.mark.parametrize("name", ["IP:127.0.0.1", "DNS:attacker.example"])
def test_over_tls_a_service_needs_a_certificate_of_its_name_and_a_known_authority(
    made: Made, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path, name)
    with Service(made[0], tls={"ssl_certfile": cert, "ssl_keyfile": key}) as service:
        for hits in (0, 4 if name.startswith("IP") else 0):
            with kdn_store(settings(service.url)) as store:
                report = answered(store).report
                assert report.chunks_hit == hits
                assert {why["kind"] for why in report.unusable} == (set() if hits else {"unreachable"})
            monkeypatch.setenv("SSL_CERT_FILE", str(cert))  # from the second round on


# What a probe measures


def test_decoding_is_measured_before_the_first_request(service: Service) -> None:
    source = KdnSource(settings(service.url, level="auto"))
    assert [source.link.decode_s(level) for level in LEVELS] == [0.0, 0.0]
    sample = source.probe([peers.some_key()], 1)
    assert sample
    assert sample.n_bytes > 0
    assert 0 < sample.round_trip_s < sample.seconds * 100
    assert source.link.decode_s("int8") > 0 == source.link.decode_s("raw")
    assert source.probe([b"\0" * 28], 1) is None  # not of this collection
    source.close()


def test_an_engine_without_an_index_measures_its_link_when_it_opens(service: Service) -> None:
    config = CONFIG.with_values(store={"location": f"{service.url}/{NAME}"})
    with Engine.open(config, model=model()) as engine:
        source = engine.fetcher.source
        assert source
        eventually(lambda: source.link.rate)


def test_a_round_trip_is_the_shortest_of_three(service: Service) -> None:
    """The seconds of a slow start would be left out of every transfer: the link would look faster each time."""
    clock, seconds = ManualClock(), iter([3.0, 0.5, 1.0])

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l == peers.HEADER:
            clock.advance(next(seconds, 0.0))

    with peers.Peer(peers.Paced(service.url, before)) as peer:
        source = KdnSource(settings(peer.url), clock=clock)
        sample = source.probe([peers.some_key()], 1)
        assert sample
        assert sample.round_trip_s == pytest.approx(0.5)
        source.close()


def test_a_level_that_a_collection_lacks_is_refused(service: Service) -> None:
    with (
        closing(KdnSource(settings(service.url, level="cachegen"))) as source,
        pytest.raises(StoreUnavailable),
    ):
        source.sizes([ChunkRequest(peers.some_key(), 1)])


# Indexes


def test_settings_and_indexes_lead_to_the_service(
    service: Service,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An index is fetched whole, and not twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, "blendserve.kdn.pull")
    for _ in range(2):
        where, config = resolve(f"{service.url}/{NAME}", CONFIG)
        assert len([r for r in caplog.records if r.name == "blendserve.kdn.pull"]) == 1
    assert read_manifest(Path(where)) == read_manifest(folder / NAME)
    remote = config.store.remote
    assert remote is not None
    assert (remote.kdn.url, remote.kdn.collection, remote.kind) == (service.url, NAME, "kdn")
    assert resolve("docs", CONFIG) == ("docs", CONFIG)
    remote = RemoteConfig(location=f"{service.url}/{NAME}", level="raw", deadline_s=peers.PATIENT_S)
    stored = StoreConfig(location=str(tmp_path), remote=remote)
    with open_store(stored, None) as store:
        assert answered(store).report.chunks_hit == 4


def test_while_the_service_is_away_a_fetched_index_is_used_and_chunks_miss(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Service(made[0]) as running:
        store = kdn_store(settings(running.url))
        assert answered(store).report.chunks_hit == 4
        options = settings(running.url)
        pull(options, tmp_path / "index")
        with pytest.raises(InputError) as error:
            pull(options, tmp_path / "other", namespace="another")
        assert error.value.setting == "store.namespace"
    assert pull(options, tmp_path / "index") == tmp_path / "index"
    assert [r.levelname for r in caplog.records if r.name == "blendserve.kdn.pull"][-1:] == ["WARNING"]
    with pytest.raises(StoreUnavailable):
        pull(options, tmp_path / "none")
    with store:
        report = answered(store).report
    assert report.chunks_hit == 0
    assert {why["kind"] for why in report.unusable} == {"unreachable"}


# Collections


def test_publishing_shows_the_progress_of_tables_that_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources.BUNDLED, "tiny", sources.BUNDLED["smollm2-135m"])
    monkeypatch.setattr(codec_fit, "FIT_TOKENS", 100)
    monkeypatch.setattr(codec_fit, "TEXT_TOKENS", 50)
    shown: dict[str, list[tuple[int, int]]] = {name: [] for name in ("computed", "done", "sampled", "fitted")}
    updates = [lambda n, total, steps=steps: steps.append((n, total)) for steps in shown.values()]
    publish(peers.publisher(tmp_path, MemoryStore(2**30)), NAME, ["predict"], *updates)
    for name, steps in shown.items():
        assert (name, len(steps) > 0, steps[-1][0]) == (name, True, steps[-1][1])


def test_publishing_again_changes_what_has_changed(tmp_path: Path) -> None:
    store, first = peers.published(tmp_path)
    engine = peers.publisher(tmp_path, store)
    same_again = publish(engine, NAME, LEVELS[1:])
    assert (same_again.directory, same_again.files) == (first.directory, first.files)
    assert engine.index is not None
    engine.index.delete(str(DOCUMENTS[0].id))
    smaller = publish(engine, NAME, ())
    assert (smaller.chunks, smaller.levels) == (first.chunks - 1, ("raw",))
    found = CollectionCatalog(store)
    assert dict(found.collections()) == {NAME: smaller}
    with pytest.raises(StoreUnavailable):  # no collection names it any more
        found.blob(first.directory)
    assert len(found.directory(smaller)) == smaller.chunks


def test_unpublishing_leaves_the_chunks_of_other_collections(tmp_path: Path) -> None:
    store, first = peers.published(tmp_path)
    second, catalog = publish(peers.publisher(tmp_path, store), "second"), CollectionCatalog(store)
    raw = set(catalog.directory(second))
    assert store.stats().pins == 2 * len(raw)  # two levels of each
    assert unpublish(catalog, NAME, delete=True) == len(raw)  # the other level alone
    assert set(store.keys()) == raw
    with pytest.raises(NotFound):
        catalog.collection(NAME)
    for pinned in (False, True):
        assert set_pins(catalog, "second", pinned) == len(raw) == first.chunks
        assert store.stats().pins == pinned * len(raw)
    unpublish(catalog, "second")
    assert (store.stats().pins, store.stats().chunks) == (0, len(raw))
    assert [info for info in store.blobs.list() if info.kind == "kdn"] == []


# Formats


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"format": 1}', None])
def test_other_bytes_and_a_newer_format_are_refused(made: Made, raw: bytes | None) -> None:
    newer = made[1].to_json().replace(b'"format": 1', b'"format": 2')
    with pytest.raises(ValueError):  # noqa: PT011
        Collection.from_json(newer if raw is None else raw)
    with pytest.raises(ValueError):  # noqa: PT011
        read_directory(bytes(KEY_BYTES), 1)  # half a row


@given(st.sets(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), min_size=1, max_size=2))
def test_levels_lie_apart_in_the_same_namespace(keys: set[bytes]) -> None:
    levels = ("raw", "int8", "predict@1")
    found = {(key, word): level_key(key, word, levels) for key in keys for word in levels}
    assert len(set(found.values())) == len(found)
    assert all(stored[:TAG_BYTES] == key[:TAG_BYTES] for (key, _), stored in found.items())
    assert all(found[key, "raw"] == key for key in keys)


@pytest.mark.parametrize("name", ["", "..", ".x", "a/b", "a b", "x" * 65, "é", "a\n"])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InputError):
        valid_name(name)
