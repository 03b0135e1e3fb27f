"""Traces say what a link lets through when; both benches' figures fit together on a tiny reader."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from blendserve.bench import delivery
from blendserve.bench.config import DeliveryConfig, DocumentConfig
from blendserve.bench.delivery import CACHEGEN, ITS_RULE, OURS, TEXT, measure, tables, traces_of
from blendserve.bench.document import STORED
from blendserve.bench.document import measure as measure_document
from blendserve.bench.document import tables as document_tables
from blendserve.bench.traces import DEAD, GBIT, changing, constant
from blendserve.blend import slow_link
from blendserve.blend.blender import Blender
from blendserve.blend.cost import CostModel
from blendserve.errors import ConfigError
from blendserve.serve.config import load_settings
from blendserve.store import open_store
from tests.support.peers import Service


def test_a_trace_is_its_steps() -> None:
    down, dead = changing(0)["down"], changing(0)["dead"]
    assert (down.rate(0.0), down.rate(0.049), down.rate(0.051), down.rate(1e9)) == (
        3 * GBIT,
        3 * GBIT,
        0.1 * GBIT,
        0.1 * GBIT,
    )
    assert dead.rate(5.0) == DEAD
    assert constant(0.5).rate(7.0) == 0.5 * GBIT
    assert not constant(0.5).changes


def test_the_same_seed_gives_the_same_links_all_of_which_change() -> None:
    assert changing(1) == changing(1) != changing(2)
    assert all(trace.changes for trace in changing(1).values())
    rates = [rate for _, rate in changing(1)["mobile"].steps]
    assert all(0.02 * GBIT <= rate <= 1.5 * GBIT for rate in rates)
    assert any(a != b for a, b in pairwise(rates))


def test_a_trace_that_is_none_is_told() -> None:
    with pytest.raises(ConfigError, match="known are"):
        traces_of(DeliveryConfig(traces=("upwards",)))


class InProcess(Service):
    """The service of a bench's settings, in this process: starting one takes seconds."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._store = open_store(load_settings(Path(command[-1])).store, None)
        super().__init__(self._store)

    def stop(self) -> None:
        super().stop()
        self._store.close()


def test_the_delivery_bench_on_a_tiny_reader(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "Child", InProcess)
    monkeypatch.setattr(slow_link.Link, "probe", lambda *_: None)  # or the next one has a sample's bytes
    monkeypatch.setattr(
        Blender, "calibrate", lambda blender, say=print: CostModel(1.0, 1e-5, 0.0, 1e-7)
    )  # silence is waited for long
    config = DeliveryConfig(
        model=tiny,
        dtype="float32",
        rates_gbit=(1.0,),
        traces=("up",),
        codecs=("raw", "int8"),
        chunks=2,
        chunk_tokens=40,
        suffix_tokens=25,
        repeats=1,
    )
    figures = measure(config)
    assert [cell["trace"] for cell in figures["cells"]] == ["1 Gbit/s", "up"]
    for cell in figures["cells"]:
        found = cell["contestants"]
        assert list(found) == [TEXT, "raw", "int8", CACHEGEN, ITS_RULE, OURS]
        assert found[TEXT]["kl"]["median"] == 0
        assert (
            found[TEXT]["bytes"]["median"] < 1_000
        )  # no chunk: at most a look at what is published, now and then
        assert found["raw"]["bytes"]["median"] > found["int8"]["bytes"]["median"] > 0
        assert found[TEXT]["of_text"]["median"] == 1
    assert len(tables(figures)[0][2]) == 12


def test_the_document_bench_on_a_tiny_reader(tiny: str) -> None:
    config = DocumentConfig(
        model=tiny, dtype="float32", document_tokens=60, question_tokens=30, repeats=1, manual=False
    )
    (document,) = measure_document(config)["documents"]
    assert document["same_first_token"]
    assert document["kl"] < 1e-6
    assert document["methods"][STORED]["tokens_run"] == 30
    assert len(document_tables({"documents": [document]})) == 2
