"""Servers as people have them: nginx, a caching proxy before it, S3; with all that can be wrong with them."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.support.nginx import Nginx
from benchmarks.support.proxy import LinkConditions, Proxy
from blendserve.blend.blender import Prefilled
from blendserve.kdn.publish import publish
from blendserve.kdn.pull import pull
from blendserve.kdn.target import PublishTarget
from blendserve.kdn.upkeep import prune, verify
from blendserve.store import MemoryStore
from tests.support import peers
from tests.support.peers import (
    BLEND,
    LEVELS,
    NAME,
    Published,
    answered,
    blender,
    check,
    kdn_store,
    question,
    settings,
)

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "deliver-a-collection.md"
ENGINES = 20
ASKED = 3  # passages


@contextmanager
def nginx(folder: Path, server: str, http: str = "") -> Iterator[Nginx]:
    if not (program := Nginx.program()):
        pytest.skip("no nginx here")
    folder.mkdir()
    with Nginx(program, folder, server, http) as running:
        yield running


def page_block(folder: Path) -> str:
    """What the page has for nginx, for this folder."""
    return PAGE.read_text().partition("```nginx\n")[2].partition("```")[0].replace("/srv/kv", str(folder))


def test_a_caching_proxy_asks_the_origin_once_a_chunk(made: Published, tmp_path: Path) -> None:
    prompt = question()
    with nginx(tmp_path / "origin", page_block(made.folder)) as origin:
        cached = f"location / {{ proxy_pass {origin.url}; proxy_cache kv; proxy_cache_lock on; }}"
        with nginx(tmp_path / "edge", cached, "proxy_cache_path cache keys_zone=kv:1m;") as edge:

            def ask(n: int) -> Prefilled:
                with kdn_store(settings(edge.url), peers.Unprobed) as store:
                    return blender(store).run(prompt, BLEND)

            with ThreadPoolExecutor(4) as pool:
                for done in pool.map(ask, range(ENGINES)):
                    check(done, prompt)
            asked, at_origin = ([p for p in each.requests if "/chunks/" in p] for each in (edge, origin))
    assert len(asked) == ENGINES * len(prompt.chunks)
    assert len(at_origin) == len(set(at_origin)) == len(prompt.chunks)


def test_redirects_and_queries_of_signed_urls_are_followed(
    made: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No log has the query."""
    caplog.set_level(logging.INFO)
    signed = f"location / {{ root {made.folder}; if ($arg_sig != secret) {{ return 403; }} }}"
    with nginx(tmp_path / "origin", signed) as origin:
        moved = f"location / {{ return 302 {origin.url}$request_uri; }}"
        with nginx(tmp_path / "moved", moved) as elsewhere:
            for secret, n_hits in (("?sig=secret", 4), ("?sig=wrong", 0), ("a key", 0)):
                monkeypatch.setenv("BLENDSERVE_COLLECTION_KEY", secret)
                with kdn_store(settings(elsewhere.url)) as store:
                    assert answered(store).report.chunks_hit == n_hits
    assert "sig=" not in caplog.text


def test_the_proxy_of_the_environment_is_used(
    made: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = "location / { proxy_pass http://$http_host$request_uri; }"
    with (
        nginx(tmp_path / "origin", f"root {made.folder};") as origin,
        nginx(tmp_path / "proxy", forward) as proxy,
    ):
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        with kdn_store(settings(origin.url), peers.Unprobed) as store:
            check(blender(store).run(question(), BLEND), question())
        assert sum("/chunks/" in path for path in proxy.requests) == len(question().chunks)


# Faults

Fault = Callable[[Path], object]


def directory_in_place(path: Path) -> None:
    """nginx redirects, and then refuses."""
    path.unlink()
    path.mkdir()


FAULTS: dict[str, Fault] = {
    "404": Path.unlink,
    "403": directory_in_place,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-9] + b"#" + path.read_bytes()[-8:]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another": lambda path: shutil.copy(next(p for p in sorted(path.parent.iterdir()) if p != path), path),
}
LINKS = {
    "good": LinkConditions(),
    "cut": LinkConditions(close_after=30_000),
    "damaging": LinkConditions(corrupt=True),
    "slow": LinkConditions(bytes_per_s=1e6),
    "dead": LinkConditions(blackhole=True),
}


@cache
def truth(hits: frozenset[int]) -> torch.Tensor:
    """The logits over a local store that has these passages alone."""
    of = blender(MemoryStore(2**30))
    of.writer.precompute([chunk.ids for n, chunk in enumerate(question(ASKED).chunks) if n in hits])
    return of.run(question(ASKED), BLEND).result.logits


@pytest.mark.parametrize("n_faults", [60, pytest.param(1_000, marks=pytest.mark.nightly)])
@pytest.mark.timeout(1200)
def test_whatever_is_wrong_an_answer_is_right_and_a_miss_has_a_reason(
    made: Published, tmp_path: Path, n_faults: int
) -> None:
    """A fault of files hits some passages; a fault of the link all; or the description is of an earlier version."""
    draw, good, bad = random.Random(n_faults), made.folder, tmp_path / "www"
    keys = [blender(made.store).key(chunk.ids) for chunk in question(ASKED).chunks]
    paths = [f"chunks/{made.directory[key][0].hash.hex()}" for key in keys]
    engine = peers.publisher(tmp_path, made.store)
    stale = publish(engine, PublishTarget(f"{tmp_path}/older/{NAME}"), ()).to_json()
    shutil.copytree(good, bad)
    shutil.copytree(tmp_path / "older", bad, dirs_exist_ok=True)
    seen, n_hits = 0, 0
    with nginx(tmp_path / "server", f"root {bad};") as server, Proxy(server.port) as link:
        while seen < n_faults:
            broken = {n: draw.choice([*FAULTS]) for n in range(ASKED) if draw.random() < 0.6}
            weather = draw.choice(["good", "good", *LINKS])
            is_stale = draw.random() < 0.2
            seen += len(broken) + (weather != "good") + is_stale
            (bad / f"{NAME}.json").write_bytes(stale if is_stale else made.file(f"{NAME}.json"))
            for n, fault in broken.items():
                FAULTS[fault](bad / paths[n])
            config = settings(f"http://127.0.0.1:{link.port}", deadline_s=0.5 if weather == "dead" else 20)
            link.conditions = LINKS[weather]
            with kdn_store(config, peers.Unprobed) as store:
                report = (done := answered(store, ASKED)).report
            hits = frozenset(
                span.chunk for span in report.layout if span.chunk is not None and span.lookup == "hit"
            )
            misses = [span for span in report.layout if span.begins_chunk and span.chunk not in hits]
            assert torch.equal(done.result.logits, truth(hits)), (broken, weather)
            assert not hits & broken.keys()
            assert weather in ("dead", "damaging") or hits | broken.keys() == set(range(ASKED)), (
                broken,
                weather,
            )
            assert all(span.lookup in ("corrupt", "unreachable") and span.reason for span in misses)
            n_hits += len(hits)
            for n in broken:
                path = bad / paths[n]
                if path.is_dir():
                    path.rmdir()
                path.write_bytes(made.file(paths[n]))
            link.reset()
    assert n_hits


# S3


def test_a_bucket(made: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published, verified, pulled and read; mended where an object is lost."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]'")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install '.[cloud]'")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "ENDPOINT_URL": url}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        s3fs.S3FileSystem().mkdir("bucket")
        engine, place = peers.publisher(tmp_path, made.store), f"s3://bucket/manuals/{NAME}"
        first = PublishTarget(place)
        collection = publish(engine, first, LEVELS[1:])
        assert verify(settings("s3://bucket/manuals")) == (collection, [])
        assert pull(settings("s3://bucket/manuals"), tmp_path / "index")
        with kdn_store(settings("s3://bucket/manuals")) as store:
            check(blender(store).run(question(), BLEND), question())
        bucket = s3fs.S3FileSystem()
        about = bucket.call_s3("head_object", Bucket="bucket", Key=f"manuals/{made.chunk()}")
        assert "immutable" in about["CacheControl"]
        again = PublishTarget(place)
        publish(engine, again, LEVELS[1:])
        assert again.written < first.written / 2
        assert prune(PublishTarget(place), 1) == 0
        bucket.rm(f"bucket/manuals/{made.chunk()}")
        assert len(verify(settings("s3://bucket/manuals"))[1]) == 1
        with kdn_store(settings("s3://bucket/manuals")) as store:
            assert answered(store).report.chunks_hit == 3
        publish(engine, PublishTarget(place), LEVELS[1:])
        assert verify(settings("s3://bucket/manuals"))[1] == []
    finally:
        server.stop()
