"""Actors on a shared store make the same of a corpus as one process, whatever happens to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blendserve.engine.engine import Engine
from blendserve.store import ChunkKey
from blendserve.workers.cluster import Share
from blendserve.workers.precompute import precompute
from tests.engine.helpers import engine as toy_engine
from tests.store.valkey.servers import needs_server, settings
from tests.workers.engines import CHUNKS, OpenToy

pytestmark = needs_server


def contents(engine: Engine) -> dict[ChunkKey, list[torch.Tensor]]:
    """Keys, and per layer [2, K, C, D]."""
    with engine.store.reading() as snapshot:
        found = {key: snapshot.get(key) for key in sorted(engine.store.keys(None))}
        return {
            key: [torch.stack(view.layer(l)) for l in range(view.n_layers)]
            for key, view in found.items()
            if view
        }


def assert_same_store(found: Engine) -> None:
    """As one process makes it: keys, and values to rounding, as chunks ran in other company."""
    with toy_engine() as alone:
        alone.blender.precompute(CHUNKS)
        one, other = contents(alone), contents(found)
    assert one.keys() == other.keys()
    for key in one:
        for a, b in zip(one[key], other[key], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("second_node")
def test_actors_one_of_which_dies_and_another_with_its_node_make_the_same_store_as_one_process(
    share: Share, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two on the first node, one on the second: it is not started again, as no node has a CPU for it."""
    monkeypatch.setattr("blendserve.workers.precompute.STACK_TOKENS", 80)  # enough stacks for all three
    opener, seen = OpenToy(settings(tmp_path), tmp_path / "puts", dies_after=4), list[tuple[int, int]]()
    with replace(opener, dies_after=None)() as engine:
        report = precompute(engine, opener, CHUNKS, 3, share, lambda *done: seen.append(done))
        noted = opener.noted()
        assert opener.died(False).exists()
        assert opener.died(True).exists()
        assert (
            len(noted) == len({key for _, key in noted}) == len(CHUNKS) + 1
        )  # and the prefix: nothing twice
        assert (report.chunks, report.left, engine.blender.missing(CHUNKS)) == (len(CHUNKS) + 1, 0, [])
        assert {total for _, total in seen} == {40 * len(CHUNKS)}
        assert_same_store(engine)
        again = precompute(engine, opener, CHUNKS, 2, share)
        assert (again.computed, again.skipped) == (0, len(CHUNKS) + 1)
