"""From a published index to an engine's answer, over real sockets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.proxy import LinkConditions, Proxy
from blendserve.blend import priors
from blendserve.config import BlendConfig, RemoteConfig, StoreConfig
from blendserve.core import Prompt
from blendserve.engine.engine import Engine
from blendserve.errors import InputError, StoreUnavailable
from blendserve.fetch import KVFetcher, open_store
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.kdn.source import KdnSource
from blendserve.fetch.layers import Layer, LayerReader
from blendserve.fetch.plan import LinkState, PendingChunk, Plan
from blendserve.kdn.pull import pull, resolve
from blendserve.retrieve import read_manifest
from blendserve.store import ChunkKey, MemoryStore
from tests.support import peers
from tests.support.engines import CONFIG
from tests.support.engines import toy_model as model
from tests.support.http import certificate
from tests.support.links import Known
from tests.support.peers import (
    LEVELS,
    NAME,
    Published,
    Service,
    answered,
    blender,
    check,
    kdn_store,
    settings,
)
from tests.support.waiting import ManualClock, eventually


@pytest.mark.parametrize(
    ("policy", "method"), [("query", "blend"), ("deviation", "blend"), ("query", "auto")]
)
def test_a_prefill_asks_for_a_layer_before_the_peer_sends_it(
    made: Published, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, policy: Any, method: Any
) -> None:
    """Of the last two chunks, which come at a time; over a fast link of all of them, each on its own connection."""
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
    with peers.delivered(made, before, link=link) as (store, paced):
        check(blender(store, costs=peers.SLOW).run(prompt, blend), prompt, blend)
    assert in_time == [True] * len(asked_for) * len(late)
    assert set(paced.asked.values()) == {1}
    assert paced.most_at_once == len(late)


def test_a_chunk_in_transit_comes_anew_at_another_level(made: Published, prompt: Prompt) -> None:
    """The planner changes it after the first layer of every chunk, once."""

    def planner(todo: Sequence[PendingChunk], link: LinkState, now: str | None) -> Plan:
        return Plan("int8" if now else "raw", len(todo))

    with peers.delivered(made, config={"level": "auto"}) as (store, paced):
        fetcher = KVFetcher(store, planner=planner)
        check(blender(store, fetcher=fetcher).run(prompt, peers.BLEND), prompt, level="int8")
    assert set(paced.asked.values()) == {2}


@pytest.mark.parametrize("together", [False, True])
def test_a_connection_that_is_cut_is_resumed(
    service: Service, made: Published, prompt: Prompt, together: bool
) -> None:
    """Each lets less than one chunk pass: only the rest is asked for again."""
    n_bytes = [bodies[together].n_bytes for bodies in made.directory.values()]
    level, blend = LEVELS[together], peers.BLEND.with_values(method="auto" if together else "blend")
    with Proxy(service.port) as link:
        config = settings(f"http://127.0.0.1:{link.port}", level=level)
        with kdn_store(config, peers.Unprobed, link=Known(1e6)) as store:
            store.source.contains([])
            before = link.down.n_bytes
            link.conditions = LinkConditions(close_after=max(n_bytes) * 2 // 3)
            check(blender(store, costs=peers.SLOW).run(prompt, blend), prompt, blend, level)
            assert sum(n_bytes) < link.down.n_bytes - before < 1.5 * sum(n_bytes)


def test_the_corpus_prior_is_delivered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priors, "MIN_TOKENS", 1)
    monkeypatch.setattr(priors, "CHUNKS_PER_PROMPT", 2)
    made = peers.published(tmp_path)
    with kdn_store(settings(str(made.folder))) as far:
        there, here = answered(far), answered(made.store)
    assert there.report.prior
    assert torch.equal(there.result.logits, here.result.logits)


@pytest.mark.parametrize("name", ["IP:127.0.0.1", "DNS:attacker.example"])
def test_over_tls_a_service_needs_a_certificate_of_its_name_and_a_known_authority(
    made: Published, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path, name)
    with Service(made.folder, tls={"ssl_certfile": cert, "ssl_keyfile": key}) as service:
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
    config = CONFIG.with_values(store={"location": f"kdn:{service.url}/{NAME}"})
    with Engine.open(config, model=model()) as engine:
        source = engine.fetcher.source
        assert source
        eventually(lambda: source.link.rate)


def test_a_round_trip_is_the_shortest_of_three(made: Published) -> None:
    """The seconds of a slow start would be left out of every transfer: the link would look faster each time."""
    clock, seconds = ManualClock(), iter([3.0, 0.5, 1.0])

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l == peers.HEADER:
            clock.advance(next(seconds, 0.0))

    with peers.Peer(peers.Paced(made, before)) as peer:
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


def test_settings_and_indexes_lead_to_the_collection(
    service: Service,
    made: Published,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An index is fetched whole, and not twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO, "blendserve.kdn.pull")
    for _ in range(2):
        where, config = resolve(f"kdn:{service.url}/{NAME}", CONFIG)
        assert len([r for r in caplog.records if r.name == "blendserve.kdn.pull"]) == 1
    assert read_manifest(Path(where)) == read_manifest(made.folder.parent / NAME)
    remote = config.store.remote
    assert remote is not None
    assert (remote.kdn.url, remote.kdn.collection, remote.kind) == (service.url, NAME, "kdn")
    assert resolve("docs", CONFIG) == ("docs", CONFIG)
    for place in (f"{service.url}/{NAME}", made.place):
        remote = RemoteConfig(location=f"kdn:{place}", level="raw", deadline_s=peers.PATIENT_S)
        stored = StoreConfig(location=str(tmp_path / place[:4]), remote=remote)
        with open_store(stored, None) as store:
            assert answered(store).report.chunks_hit == 4


def test_while_the_server_is_away_a_fetched_index_is_used_and_chunks_miss(
    made: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Service(made.folder) as running:
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
