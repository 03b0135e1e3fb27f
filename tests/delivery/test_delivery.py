"""From a published index to an engine's answer, over real sockets; and what publishing keeps."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.proxy import LinkConditions, Proxy
from blendserve.blend import priors
from blendserve.config import RemoteConfig, StoreConfig, changed
from blendserve.core import Prompt
from blendserve.errors import InputError, NotFound, StoreUnavailable
from blendserve.fetch import TieredStore, open_store
from blendserve.fetch.kdn.manifest import Collection, level_key, read_directory, valid_name
from blendserve.fetch.kdn.source import KdnSource
from blendserve.kdn.catalogue import Catalogue
from blendserve.kdn.publish import publish, set_pins, unpublish
from blendserve.kdn.pull import pull, resolve
from blendserve.retrieve.manifest import read as read_index
from blendserve.store import KVStore, LMDBStore
from blendserve.store.base import REMOTE
from blendserve.store.key import KEY_BYTES, TAG_BYTES
from tests.support import peers
from tests.support.engines import CONFIG, PASSAGES
from tests.support.http import DOCUMENTS
from tests.support.peers import (
    NAME,
    PATIENT_S,
    Service,
    answered,
    blender,
    check,
    kdn_store,
    published,
    settings,
)

Made = tuple[KVStore, Collection]


@pytest.mark.parametrize("level", peers.LEVELS)
def test_what_is_delivered_answers_as_a_local_store_at_that_level(
    service: Service, prompt: Prompt, level: str
) -> None:
    with kdn_store(settings(service.url, level=level)) as store:
        done = blender(store).run(prompt, peers.BLEND)
    check(done, prompt, level=level)
    assert (done.report.tiers, done.report.unusable) == ({REMOTE: len(PASSAGES)}, ())


def test_behind_an_own_store_each_chunk_comes_once(service: Service, tmp_path: Path) -> None:
    with TieredStore(LMDBStore(tmp_path / "kv", 2**28), KdnSource(settings(service.url))) as store:
        assert answered(store).report.tiers == {REMOTE: 4}
        store.flush()
        assert answered(store).report.tiers == {"local": 4}
        blender(store).writer.precompute(
            [peers.question(1).chunks[0].ids]
        )  # the service is not asked to store it
        assert not store.delete([b"\0" * KEY_BYTES])
        assert store.stats().remote is not None


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_connection_that_is_cut_is_resumed(
    service: Service, made: Made, prompt: Prompt, interleaved: bool
) -> None:
    """Each lets less than one chunk pass, or less than all interleaved ones: only the rest is asked for again."""
    n_bytes = [entry.bodies[interleaved] for entry in Catalogue(made[0]).directory(made[1]).values()]
    level, blend = peers.LEVELS[interleaved], changed(peers.BLEND, method="auto" if interleaved else "blend")
    with Proxy(service.port) as link:
        config = settings(f"http://127.0.0.1:{link.port}", level=level)
        with kdn_store(config, peers.Unprobed, link=peers.Known(1e6)) as store:
            store.source.contains([])
            before = link.down.n_bytes
            link.conditions = LinkConditions(
                close_after=(sum(n_bytes) if interleaved else max(n_bytes)) * 2 // 3
            )
            done = blender(store, costs=peers.SLOW).run(prompt, blend)
            assert sum(n_bytes) < link.down.n_bytes - before < 1.5 * sum(n_bytes)
    assert done.report.tiers == {REMOTE: len(PASSAGES)}
    check(done, prompt, changed(blend, method=done.report.method), level=level)


def test_a_service_that_goes_is_a_miss_and_one_that_comes_is_used(made: Made) -> None:
    with Service(made[0]) as running:
        store = kdn_store(settings(running.url))
        assert answered(store).report.chunks_hit == 4
    with store:
        done = answered(store)
    assert done.report.chunks_hit == 0
    assert {why.kind for why in done.report.unusable} == {"unreachable"}


def test_the_corpus_prior_is_delivered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priors, "MIN_TOKENS", 1)
    monkeypatch.setattr(priors, "CHUNKS_PER_PROMPT", 2)
    store, collection = published(tmp_path)
    assert any(tables.codec == priors.NAME for tables in collection.tables)
    with Service(store) as running, kdn_store(settings(running.url)) as far:
        there, here = answered(far), answered(store)
    assert there.report.prior
    assert torch.equal(there.result.logits, here.result.logits)


def test_over_tls_a_service_needs_a_certificate_of_a_known_authority(made: Made, tmp_path: Path) -> None:
    if not (openssl := shutil.which("openssl")):
        pytest.skip("openssl, which makes the certificate, is not installed")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    about = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    command = [openssl, *about.split(), "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    with Service(made[0], tls={"ssl_certfile": certificate, "ssl_keyfile": key}) as service:
        for ca_file, hits in ((certificate, 4), (None, 0)):
            with kdn_store(settings(service.url, ca_file=ca_file)) as store:
                report = answered(store).report
                assert report.chunks_hit == hits
                assert {why.kind for why in report.unusable} == (set() if hits else {"unreachable"})


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
        where, config = resolve(f"kdn:{service.url}/{NAME}", CONFIG)
        assert len([r for r in caplog.records if r.name == "blendserve.kdn.pull"]) == 1
    assert read_index(Path(where))[:2] == read_index(folder / NAME)[:2]
    remote = config.store.remote
    assert remote is not None
    assert (remote.kdn.url, remote.kdn.collection, remote.kind) == (service.url, NAME, "kdn")
    assert resolve("docs", CONFIG) == ("docs", CONFIG)
    remote = RemoteConfig(location=f"{service.url}/{NAME}", level="raw", deadline_s=PATIENT_S)
    stored = StoreConfig(location=str(tmp_path), remote=remote)
    with open_store(stored, None) as store:
        assert answered(store).report.chunks_hit == 4


def test_a_fetched_index_is_used_while_the_service_is_away(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Service(made[0]) as running:
        options = settings(running.url)
        pull(options, tmp_path / "index")
        with pytest.raises(InputError) as error:
            pull(options, tmp_path / "other", namespace="another")
        assert error.value.setting == "store.namespace"
    assert pull(options, tmp_path / "index") == tmp_path / "index"
    assert [r.levelname for r in caplog.records if r.name == "blendserve.kdn.pull"][-1:] == ["WARNING"]
    with pytest.raises(StoreUnavailable):
        pull(options, tmp_path / "none")


# Collections


def test_publishing_again_changes_what_has_changed(tmp_path: Path) -> None:
    store, first = published(tmp_path)
    engine = peers.publisher(tmp_path, store)
    same_again = publish(engine, NAME, peers.LEVELS[1:])
    assert (same_again.directory, same_again.files) == (first.directory, first.files)
    assert engine.index is not None
    engine.index.delete(str(DOCUMENTS[0].id))
    engine.index.save()
    smaller = publish(engine, NAME, ())
    assert (smaller.chunks, smaller.levels) == (first.chunks - 1, ("raw",))
    found = Catalogue(store)
    assert dict(found.collections()) == {NAME: smaller}
    with pytest.raises(StoreUnavailable):  # no collection names it any more
        found.blob(first.directory)
    assert len(found.directory(smaller)) == smaller.chunks


def test_retiring_leaves_the_chunks_of_other_collections(tmp_path: Path) -> None:
    store, first = published(tmp_path)
    second, catalogue = publish(peers.publisher(tmp_path, store), "second"), Catalogue(store)
    raw = set(catalogue.directory(second))
    assert store.stats().pins == 2 * len(raw)  # two levels of each
    assert unpublish(store, catalogue, NAME, delete=True) == len(raw)  # the other level alone
    assert set(store.keys()) == raw
    with pytest.raises(NotFound):
        catalogue.collection(NAME)
    for pinned in (False, True):
        assert set_pins(store, catalogue, "second", pinned) == len(raw) == first.chunks
        assert store.stats().pins == pinned * len(raw)
    unpublish(store, catalogue, "second")
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


@given(*[st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)] * 2)
def test_levels_lie_apart_in_the_same_namespace(a: bytes, b: bytes) -> None:
    levels = ("raw", "int8", "predict@1")
    found = {(key, word): level_key(key, word, levels) for key in (a, b) for word in levels}
    assert len(set(found.values())) == len(found)
    assert all(stored[:TAG_BYTES] == key[:TAG_BYTES] for (key, _), stored in found.items())
    assert found[a, "raw"] == a


@pytest.mark.parametrize("name", ["", "..", ".x", "a/b", "a b", "x" * 65, "é", "a\n"])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InputError):
        valid_name(name)
