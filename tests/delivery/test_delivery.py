"""From a published index to an engine's answer, over real sockets; and what any plain client may ask for."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from blendserve.bench.link import Link, Weather
from blendserve.blend import priors
from blendserve.config import BlendConfig, RemoteConfig, StoreConfig, TiersConfig
from blendserve.core import Prompt
from blendserve.delivery.catalogue import Catalogue
from blendserve.delivery.publish import publish, retire, set_pins
from blendserve.delivery.pull import pull, resolve
from blendserve.engine.engine import Engine
from blendserve.errors import InputError, NotFound, StoreUnavailable
from blendserve.retrieve.manifest import read as read_index
from blendserve.serve.keys import KeyFile, Tenant
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore, open_store
from blendserve.store.codecs.int8 import Int8
from blendserve.store.kdn.collection import Collection, body, level_key
from blendserve.store.kdn.store import KdnStore
from tests.delivery.helpers import LEVELS, NAME, Service, published, publisher, settings
from tests.engine.helpers import CONFIG, PASSAGES, reader
from tests.serve.helpers import DOCUMENTS, bearer
from tests.store.helpers import read, same

BLEND = BlendConfig(method="blend")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def made(folder: Path) -> tuple[KVStore, Collection]:
    return published(folder)


def logits(store: KVStore, hits: int = 4) -> tuple[torch.Tensor, Any]:
    """Of a prompt whose chunks are the store's."""
    engine = Engine(CONFIG, reader(), store)
    prompt: Prompt = engine.prompts.build("Who sat on the mat?", PASSAGES[:4])
    done = engine.blender.run(prompt, BLEND)
    assert done.report.chunks_hit == hits, done.report
    return done.prefilled.logits, done.report


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_delivered_answers_as_a_local_store_at_that_level(service: Service, level: str) -> None:
    with KdnStore(settings(service.url, level=level)) as delivered:
        there, report = logits(delivered)
    local = MemoryStore(2**30, codec=None if level == "raw" else Int8())
    Engine(CONFIG, reader(), local).precompute(PASSAGES)
    here, _ = logits(local)
    assert torch.equal(there, here)
    assert report.tiers == {"remote": 4}
    assert not report.unusable


def test_levels_are_not_the_same_bytes(service: Service, made: tuple[KVStore, Collection]) -> None:
    """Or the test above could not fail."""
    key = next(iter(Catalogue(made[0]).directory(made[1])))
    found = {get(service, f"chunks/{key.hex()}?level={level}").content for level in LEVELS}
    assert len(found) == len(LEVELS) or key == prefix_key()


def test_behind_a_store_of_ones_own_chunks_come_once(service: Service, tmp_path: Path) -> None:
    near, far = LMDBStore(tmp_path / "kv", 2**28), KdnStore(settings(service.url))
    with LayeredStore(near, far) as store:
        assert logits(store)[1].tiers == {"remote": 4}
        store.flush()
        assert logits(store)[1].tiers == {"local": 4}
        engine = Engine(CONFIG, reader(), store)
        engine.precompute([PASSAGES[0]])
        assert not store.delete(b"\0" * 28)  # the service is not asked to
        assert store.stats().remote is not None


@examples(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    first=st.integers(0, 5000), length=st.integers(1, 5000), kind=st.sampled_from(["both", "from", "last"])
)
def test_any_part_is_that_part_of_the_whole(service: Service, first: int, length: int, kind: str) -> None:
    path = f"chunks/{some_key(service).hex()}"
    whole = get(service, path)
    body = whole.content
    words = {"both": f"{first}-{first + length - 1}", "from": f"{first}-", "last": f"-{length}"}
    part = get(service, path, Range=f"bytes={words[kind]}")
    wanted = {"both": body[first : first + length], "from": body[first:], "last": body[-length:]}[kind]
    assert (part.content, part.status_code) == (wanted, 200 if wanted == body else 206 if wanted else 416)
    if part.status_code == 206:
        begin = first if kind != "last" else len(body) - len(wanted)
        assert part.headers["Content-Range"] == f"bytes {begin}-{begin + len(wanted) - 1}/{len(body)}"
    changed = get(service, path, **{"Range": f"bytes={words[kind]}", "If-Range": '"another"'})
    assert (changed.status_code, changed.content) == (200, body)


def test_what_a_client_has_is_not_sent_again(service: Service) -> None:
    path = f"chunks/{some_key(service).hex()}"
    tag = get(service, path).headers["ETag"]
    again = get(service, path, **{"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    head = service.http.head(f"/collections/{NAME}/{path}")
    assert (head.content, head.headers["ETag"]) == (b"", tag)
    assert get(service, f"{path}?level=int8").headers["ETag"] != tag or some_key(service) == prefix_key()


def test_a_connection_that_is_cut_is_resumed(service: Service, made: tuple[KVStore, Collection]) -> None:
    """The link lets through less than a chunk before it cuts: only the rest is asked for again."""
    largest = max(max(entry.bodies) for entry in Catalogue(made[0]).directory(made[1]).values())
    with Link(service.port) as link, KdnStore(settings(url_of(link))) as store:
        assert len(list(store.keys())) == made[1].chunks  # description and directory are there
        link.weather = Weather(cut_after=largest * 2 // 3)
        before = link.down.n_bytes
        with store.reading() as snapshot:
            snapshot.expect(list(store.keys()))
            found = {key: snapshot.get(key) for key in list(store.keys())}
        whole = sum(entry.bodies[0] for entry in Catalogue(made[0]).directory(made[1]).values())
        assert all(view is not None for view in found.values())
        assert all(same(read(store, key), read(made[0], key)) for key in list(found)[:1])  # type: ignore[arg-type]
        assert link.down.n_bytes - before < 3 * whole


def test_any_service_on_the_store_delivers_the_same_and_a_death_loses_nothing(
    made: tuple[KVStore, Collection],
) -> None:
    with Service(made[0]) as first, Service(made[0]) as second:
        key = some_key(first)
        a, b = (get(each, f"chunks/{key.hex()}") for each in (first, second))
        assert (a.content, a.headers["ETag"]) == (b.content, b.headers["ETag"])
        first.stop()
        assert get(second, f"chunks/{key.hex()}").content == a.content
        first.http = second.http


def test_a_service_that_goes_is_a_miss_and_one_that_comes_is_used(made: tuple[KVStore, Collection]) -> None:
    with Service(made[0]) as running:
        store = KdnStore(settings(running.url))
        logits(store)
    with store:
        _, report = logits(store, hits=0)
        assert {unusable.kind for unusable in report.unusable} == {"unreachable"}


def test_the_index_comes_whole_and_not_twice(
    service: Service, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    where, config = resolve(f"kdn:{service.url}/{NAME}", CONFIG, said.append)
    assert read_index(Path(where))[:2] == read_index(folder / NAME)[:2]
    remote = config.store.tiers.remote
    assert remote is not None
    assert (remote.kdn.url, remote.kdn.collection, remote.kind) == (service.url, NAME, "kdn")
    assert len(said) == 1
    resolve(f"kdn:{service.url}/{NAME}", CONFIG, said.append)
    assert len(said) == 1
    assert resolve("docs", CONFIG) == ("docs", CONFIG)


def test_an_index_that_was_fetched_is_used_while_the_service_is_away(
    made: tuple[KVStore, Collection], tmp_path: Path
) -> None:
    said: list[str] = []
    with Service(made[0]) as running:
        options = settings(running.url)
        pull(options, tmp_path / "index")
        with pytest.raises(InputError, match="namespace"):
            pull(options, tmp_path / "other", namespace="someone's")
    assert pull(options, tmp_path / "index", said.append) == tmp_path / "index"
    assert "using the last fetched index" in said[0]
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        pull(options, tmp_path / "none")


def test_settings_open_it_behind_a_store(service: Service, tmp_path: Path) -> None:
    remote = RemoteConfig(kind="kdn", kdn=settings(service.url))
    config = StoreConfig(path=tmp_path, tiers=TiersConfig(remote=remote))
    with open_store(config, None) as store:
        assert logits(store)[1].chunks_hit == 4


# Collections


def test_publishing_again_changes_what_has_changed(tmp_path: Path) -> None:
    store, first = published(tmp_path)
    engine = publisher(tmp_path, store)
    same_again = publish(engine, NAME, LEVELS[1:])
    assert (same_again.directory, same_again.files) == (first.directory, first.files)
    assert engine.index is not None
    engine.index.delete(str(DOCUMENTS[0].id))
    engine.index.save()
    smaller = publish(engine, NAME, ())
    assert (smaller.chunks, smaller.levels) == (first.chunks - 1, ("raw",))
    found = Catalogue(store)
    assert dict(found.collections()) == {NAME: smaller}
    with pytest.raises(StoreUnavailable, match="missing"):  # what nobody names any more is gone
        found.blob(first.directory)
    assert len(found.directory(smaller)) == smaller.chunks


def test_retiring_leaves_what_others_have(tmp_path: Path) -> None:
    store, first = published(tmp_path)
    engine = publisher(tmp_path, store)
    second = publish(engine, "second")
    catalogue = Catalogue(store)
    raw = set(catalogue.directory(second))
    assert store.stats().pins == 2 * len(raw)  # two levels of each
    assert retire(store, catalogue, NAME, delete=True) == len(raw)  # the other level alone
    assert set(store.keys()) == raw
    with pytest.raises(NotFound):
        catalogue.collection(NAME)
    assert (
        set_pins(store, catalogue, "second", False) == len(raw) == set_pins(store, catalogue, "second", True)
    )
    assert store.stats().pins == len(raw)
    retire(store, catalogue, "second")
    assert (store.stats().pins, store.stats().chunks) == (0, len(raw))
    assert [info for info in store.all_tables() if info.codec == "kdn"] == []
    assert first.chunks == len(raw)


def test_a_body_is_the_record_whatever_key_it_lies_under(made: tuple[KVStore, Collection]) -> None:
    store, collection = made
    for key, entry in Catalogue(store).directory(collection).items():
        for word, n_bytes in zip(collection.levels, entry.bodies, strict=True):
            coded = store.coded(level_key(key, word, collection.levels))
            assert coded is not None
            assert sum(map(len, body(key, coded))) == n_bytes


# Who may read what


@pytest.fixture(scope="module")
def guarded(made: tuple[KVStore, Collection], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.json")
    keys = {
        "reader": file.create(Tenant("reader", collections=(NAME,))),
        "other": file.create(Tenant("other", collections=("another",))),
        "admin": file.create(Tenant("admin", admin=True)),
        "slow": file.create(Tenant("slow", max_per_minute=2)),
    }
    with Service(made[0], keys=file.path) as running:
        yield running, keys


def test_what_is_not_for_a_key_is_as_what_is_not_there(guarded: Any) -> None:
    """Status, body and headers alike; and the store is asked alike: not at all."""
    service, keys = guarded
    key = some_key(service, keys["reader"]).hex()
    for below in (
        "",
        "/directory",
        f"/chunks/{key}",
        f"/layers?chunks={key}:raw",
        "/chunks/00",
        "/tables/00",
        "/pieces/00",
    ):
        replies = [
            service.http.get(f"/collections/{name}{below}", headers=bearer(keys["other"]))
            for name in (NAME, "none", "%00")
        ]
        assert {reply.status_code for reply in replies} == {404}
        assert len({reply.text for reply in replies}) == 1
        assert len({tuple(sorted(reply.headers.keys() - {"x-request-id"})) for reply in replies}) == 1
    listed = {who: service.http.get("/collections", headers=bearer(keys[who])).json()["data"] for who in keys}
    assert [len(listed[who]) for who in ("reader", "other", "admin")] == [1, 0, 1]
    assert service.http.get(f"/collections/{NAME}").status_code == 401


def test_a_hidden_collection_costs_the_store_what_a_missing_one_does(guarded: Any) -> None:
    service, keys = guarded
    asked: list[str] = []
    store = service.inner.store

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(store, name)

    service.inner.catalogue._store = service.inner.store = Counting()
    service.inner.catalogue._fresh = 1e9
    try:
        service.http.get("/collections", headers=bearer(keys["admin"]))
        asked.clear()
        for name in (NAME, "none"):
            service.http.get(f"/collections/{name}", headers=bearer(keys["other"]))
        assert asked == []
        service.http.get(f"/collections/{NAME}/directory", headers=bearer(keys["reader"]))
        assert asked != []
    finally:
        service.inner.catalogue._store = service.inner.store = store


def test_only_admins_change_anything(guarded: Any) -> None:
    service, keys = guarded
    for verb, path in (("POST", "/pin"), ("POST", "/unpin"), ("DELETE", "")):
        for who, status in (("reader", 403), ("other", 404)):
            reply = service.http.request(verb, f"/collections/{NAME}{path}", headers=bearer(keys[who]))
            assert reply.status_code == status
    pinned = service.http.post(f"/collections/{NAME}/pin", headers=bearer(keys["admin"]))
    assert pinned.json()["pinned"] > 0


def test_who_asks_too_often_is_refused(guarded: Any) -> None:
    service, keys = guarded
    replies = [service.http.get("/collections", headers=bearer(keys["slow"])).status_code for _ in range(4)]
    assert replies[-1] == 429


def test_bytes_have_a_quota(made: tuple[KVStore, Collection]) -> None:
    with Service(made[0], mb_per_minute=0.01) as service:
        path = f"chunks/{some_key(service).hex()}"
        replies = [get(service, path).status_code for _ in range(3)]
        assert replies[0] == 200
        assert replies[-1] == 429


def some_key(service: Service, key: str = "") -> bytes:
    return service.http.get(f"/collections/{NAME}/directory", headers=bearer(key)).content[:28]


def prefix_key() -> bytes:
    engine = Engine(CONFIG, reader(), MemoryStore(1))
    return engine.blender.key(engine.prompts.prefix, ())


def get(service: Service, path: str, **headers: str) -> Any:
    return service.http.get(f"/collections/{NAME}/{path}", headers=headers)


def url_of(link: Link) -> str:
    return f"http://127.0.0.1:{link.port}"


def test_what_the_corpus_has_shown_is_delivered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priors, "LEAST_TOKENS", 1)
    monkeypatch.setattr(priors, "TOGETHER", 2)
    store, collection = published(tmp_path)
    assert any(tables.codec == priors.NAME for tables in collection.tables)
    with Service(store) as running:
        far = KdnStore(settings(running.url))
        there, report = logits(far)
        here, _ = logits(store)
        far.close()
    assert report.prior
    assert torch.equal(there, here)


def test_over_tls_a_service_needs_a_certificate_that_an_authority_vouches_for(
    made: tuple[KVStore, Collection], tmp_path: Path
) -> None:
    if not (openssl := shutil.which("openssl")):
        pytest.skip("openssl, which makes the certificate, is not installed")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    about = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    made_by = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
    subprocess.run([*made_by, "-out", certificate, "-keyout", key, *about], check=True, capture_output=True)
    with Service(made[0], (certificate, key)) as service:
        with KdnStore(settings(service.url, ca_file=certificate)) as store:
            assert logits(store)[1].tiers == {"remote": 4}
        with KdnStore(settings(service.url)) as store:
            report = logits(store, hits=0)[1]
            assert {why.kind for why in report.unusable} == {"unreachable"}
            assert "no authority known here vouches for" in report.unusable[0].reason
