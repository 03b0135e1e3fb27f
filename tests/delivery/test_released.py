"""What a request had in hand is free when its answer is: no error that somebody keeps holds it until the garbage
collector comes by, nor do views of chunks that came."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.errors import CorruptRecord, unraised
from blendserve.models.kv_cache import KVCache
from blendserve.registry import CODECS
from blendserve.store import ChunkKey, KVStore, LMDBStore, MemoryStore
from blendserve.store.ahead import ReadAhead
from blendserve.store.chunk import StoredChunk
from blendserve.store.codecs.base import Undecodable, forget_ready
from blendserve.store.kdn.adapt import TEXT, Offer, Situation
from blendserve.store.layered import LayeredStore
from blendserve.store.network.arrival import Arrival
from tests.delivery.helpers import Service
from tests.delivery.paced import BLEND, blender, delivered, last_two
from tests.engine.helpers import wait_for
from tests.store.helpers import flip, tamper
from tests.store.toy_codec import Toy

CAP = 2**26
HELD = (KVCache, Arrival, StoredChunk)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Of what is made inside, once threads have put down what they had in hand; the collector does not run."""
    gc.collect()
    gc.disable()
    try:
        before = {id(held) for held in gc.get_objects() if type(held) in HELD}
        yield
        left = [
            weakref.ref(held) for held in gc.get_objects() if type(held) in HELD and id(held) not in before
        ]
        wait_for(lambda: not any(of() for of in left))
    finally:
        gc.enable()


def asked(store: KVStore, prompt: Prompt, blend: BlendConfig = BLEND) -> list[str]:
    """What was wrong with chunks."""
    return [why.kind for why in blender(store).run(prompt, blend).report.unusable]


def changed(part: bytearray) -> None:
    part[-1] ^= 1


def cut(part: bytearray) -> None:
    raise ConnectionError


TROUBLES: dict[str, Callable[[bytearray], None]] = {"corrupt": changed, "unreachable": cut}


@pytest.mark.parametrize("kind", ["", "slow link", *TROUBLES])
@pytest.mark.parametrize("method", ["blend", "auto"])
def test_of_what_a_service_delivers(service: Service, prompt: Prompt, kind: str, method: str) -> None:
    late = last_two(prompt)

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if kind in TROUBLES and key in late:
            TROUBLES[kind](part)

    def rule(offers: Sequence[Offer], now: Situation, going_on: str | None = None) -> str:
        return TEXT if kind == "slow link" else "raw"

    with delivered(service, before, rule) as (store, _):
        blender(store).run(prompt, BlendConfig(method="full"))
        with nothing_left():
            kinds = set(asked(store, prompt, BlendConfig.model_validate({"method": method})))
        assert kinds == ({kind} if kind else set())


@contextmanager
def stored(folder: Path, prompt: Prompt, kind: str) -> Iterator[KVStore]:
    """In a folder, one chunk of it damaged or of a codec that is not there."""
    with LMDBStore(folder, CAP) as store:
        blender(store).precompute([chunk.ids for chunk in prompt.chunks])
        key: ChunkKey = blender(store).key(prompt.chunks[1].ids)
        if kind == "codec":
            store.delete(key)
            store.write_by(Toy())
            blender(store).precompute([prompt.chunks[1].ids])
    if kind == "corrupt":
        tamper(folder, flip(b"h" + key, 20))
    with LMDBStore(folder, CAP) as store:
        yield store


@pytest.mark.parametrize("kind", ["", "corrupt", "codec"])
@pytest.mark.parametrize("place", ["here", "there", "read ahead"])
def test_of_a_store(tmp_path: Path, prompt: Prompt, toy_codec: None, kind: str, place: str) -> None:
    with ExitStack() as stack:
        store: KVStore = stack.enter_context(stored(tmp_path, prompt, kind))
        if place == "there":
            store = stack.enter_context(LayeredStore(MemoryStore(CAP), store))
        if place == "read ahead":
            store = stack.enter_context(ReadAhead(store, CAP))
        if kind == "codec":
            CODECS.remove("toy")
            forget_ready()
            stack.callback(CODECS.add, "toy", "tests.store.toy_codec:Toy")
        with nothing_left():
            blender(store).prefetch(prompt, BLEND)
            kinds = asked(store, prompt)
        assert kinds == ([kind] if kind else [])


def test_an_error_that_is_kept_says_what_it_said_and_holds_nobody() -> None:
    for error in (CorruptRecord(b"key", "it is torn"), Undecodable("no tables", "codec")):
        try:
            raise error from ValueError("why")
        except Exception as raised:
            kept = unraised(raised)
        assert (type(kept), str(kept), vars(kept)) == (type(error), str(error), vars(error))
        assert (kept.__traceback__, kept.__cause__, kept.__context__) == (None, None, None)
