"""Stores that an earlier release wrote are read as it read them: an LMDB file of format 3, and a Valkey server.

stores/*.json.gz hold the records of the commit 974603a: chunks of three codecs, pinned and not, in two
namespaces, tables, a prior and a published collection. stores/stores.json is what that commit read of them.
"""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch

from blendserve.kdn.catalog import CollectionCatalog
from blendserve.kv import stacked
from blendserve.store import KVStore, LMDBStore, read_record
from blendserve.store.valkey_client import library
from tests.support.stores import has, key_of, read
from tests.support.valkey import database, needs_server, store_at

HERE = Path(__file__).parent / "stores"
SAID: dict[str, Any] = json.loads((HERE / "stores.json").read_text())
CAP = 1 << 20
OF_THE_KIND = dict.fromkeys(("kind", "path", "hits"))  # a server's snapshot counts a chunk once


def saved(file: str) -> dict[bytes, Any]:
    """Names and values; all bytes are hexadecimal."""
    found = json.loads(gzip.decompress((HERE / file).read_bytes()))
    return {bytes.fromhex(name): value for name, value in found.items()}


def write_lmdb(folder: Path) -> None:
    folder.mkdir()
    with lmdb.open(str(folder), map_size=1 << 28) as env, env.begin(write=True) as txn:
        for name, value in saved("lmdb.json.gz").items():
            txn.put(name, bytes.fromhex(value))


def write_valkey(folder: Path) -> None:
    client = library().Valkey.from_url(database(folder))
    for name, (kind, ttl, *words) in saved("valkey.json.gz").items():
        items = list(map(bytes.fromhex, words))
        fields = dict(zip(items[::2], items[1::2], strict=False))
        if kind == "string":
            client.set(name, items[1])
        elif kind == "set":
            client.sadd(name, *items)
        elif kind == "zset":
            client.zadd(name, {member: float(score) for member, score in fields.items()})
        else:
            client.hset(name, mapping=fields)
        if ttl > 0:
            client.expire(name, ttl)


def opened(kind: str, folder: Path, **options: Any) -> KVStore:
    return LMDBStore(folder, CAP, **options) if kind == "lmdb" else store_at(folder, CAP, **options)


def read_all(store: KVStore) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, info in store.describe(list(store.keys())).items():
        kv, record = read(store, key), read_record(store, key)
        assert kv is not None
        assert record is not None
        bits = b"".join(
            x.contiguous().view(torch.uint8).numpy().tobytes() for x in (stacked(kv.keys), stacked(kv.values))
        )
        found[key.hex()] = {
            **{name: getattr(info, name) for name in ("n_tokens", "n_bytes", "raw_bytes", "pinned")},
            "kv": blake2b(bits, digest_size=16).hexdigest(),
            "token_ids": list(info.token_ids),
            "codec": record.coding.codec,
        }
    return found


@pytest.mark.parametrize("kind", ["lmdb", pytest.param("valkey", marks=needs_server)])
def test_a_store_of_an_earlier_release_is_read_and_written_on(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    (write_lmdb if kind == "lmdb" else write_valkey)(folder)
    for read_only in (True, False):
        with opened(kind, folder, read_only=read_only) as store:
            for namespace, said in ((None, SAID["stats"]), ("tenant", SAID["tenant"])):
                assert store.stats(namespace).to_dict() | OF_THE_KIND == said | OF_THE_KIND
            blobs = {info.hash.hex(): [info.kind, info.owner, info.n_bytes] for info in store.blobs.list()}
            # A collection's description has its date, so its hash differs from store to store.
            assert sorted(blobs.values()) == sorted(SAID["blobs"].values())
            collection = json.loads(CollectionCatalog(store).collection("collection").to_json())
            assert {**collection, "published": ""} == {**SAID["collection"], "published": ""}
            assert store.verify().bad == store.verify().bad_tables == ()
    with ExitStack() as stack:
        store = stack.enter_context(opened(kind, folder))
        assert read_all(store) == SAID["chunks"]
        assert store.delete([key_of(1)]) == 1
        assert store.pin([key_of(0)], pinned=False) == 1
        assert not has(store, key_of(1))
        now = store.stats()
        assert (now.chunks, now.pins) == (SAID["stats"]["chunks"] - 1, SAID["stats"]["pins"] - 1)
        assert store.verify().bad == ()
