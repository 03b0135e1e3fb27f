"""Methods over coded KV: the codec alone differs, sizes are those of records, and exact alone is its loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.config import StoreConfig, changed
from blendserve.core import ChunkKV, Document
from blendserve.engine.calibration import chunks_of, fit
from blendserve.errors import ConfigError, TablesMissing
from blendserve.evaluate.coded import coded_store, exact_context, size
from blendserve.evaluate.plots import coded as plot
from blendserve.evaluate.variants import variants
from blendserve.store import MemoryStore, record
from blendserve.store.codecs.int8 import Int8
from tests.evaluate.helpers import CONFIG, passage, predictions, run, tiny_engine, write_dataset

QUESTIONS = 3
METHODS = (
    "query@0.25",
    "query@0.25/int8",
    "reuse/int8",
    "query@0.25/bos/int8",
    "exact",
    "exact/int8",
    "prefix/int8",
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("coded")
    return run(folder, write_dataset(folder, QUESTIONS), methods=METHODS)


def test_words_with_codecs() -> None:
    found = {v.name: v for v in variants([*METHODS, "query+shift/int8@0"], (0.1,), coded=True)}
    assert set(METHODS) <= set(found)
    assert found["query@0.25/bos/int8"].uncoded == "query@0.25/bos"
    assert found["query+shift@0.1/int8"].curve == "query+shift/int8"
    for word, why in (
        ("full/int8", "reads no stored KV"),
        ("query@0.1/int8@4", "known are int8@0"),
        ("query@0.1/int8/bos", "'bos'"),
        ("query@0.1/int9", "did you mean 'int8'"),
        ("exact@0.1", "takes no"),
    ):
        with pytest.raises(ConfigError, match=why):
            variants([word], (), coded=True)
    with pytest.raises(ConfigError, match="bench codec"):
        variants(["reuse/int8"], ())


def test_what_is_exact_is_full_prefill_and_loses_what_its_codec_does(done: Any) -> None:
    methods = done.figures["methods"]
    assert methods["exact"]["mean_kl"]["mean"] < 1e-9
    assert methods["exact"]["identical"]["mean"] == 1
    assert 1e-9 < methods["exact/int8"]["mean_kl"]["mean"] < 0.01 * methods["reuse"]["mean_kl"]["mean"]
    assert methods["prefix/int8"]["mean_kl"]["mean"] > 1e-9


def test_a_good_codec_changes_a_method_a_little(done: Any) -> None:
    methods = done.figures["methods"]
    for name, uncoded in (("query@0.25/int8", "query@0.25"), ("reuse/int8", "reuse")):
        ours, theirs = (methods[n]["mean_kl"]["mean"] for n in (name, uncoded))
        assert ours != theirs
        assert ours == pytest.approx(theirs, rel=0.05)
        assert methods[name]["uncoded"] == uncoded


def test_sizes_are_those_of_records(done: Any) -> None:
    for line in predictions(done):
        assert bool(line["kv"]) == ("int8" in line["method"])
        if line["kv"]:
            assert 3 < line["kv"]["raw_bytes"] / line["kv"]["bytes"] < 4  # of 32 bits
    methods = done.figures["methods"]
    assert methods["query@0.25"]["kv_smaller"] is None
    assert 3 < methods["exact/int8"]["kv_smaller"] < 4
    kv = ChunkKV(torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8))
    header, segments = record.encode(bytes(28), kv, Int8())
    coded = record.Coded(header.shape, header.coding, segments)
    assert size(coded)["bytes"] == sum(map(len, segments)) + len(record.encode_header(bytes(28), header))


def test_the_context_of_exact_is_coded_part_by_part() -> None:
    engine = tiny_engine()
    from blendserve import Passage

    prompt = engine.prompts.build("Where?", [Passage(passage(n)["text"]) for n in range(3)])
    by = coded_store(engine, "int8")
    whole, kv, taken = exact_context(engine.reader.adapter, prompt, by)
    plain = exact_context(engine.reader.adapter, prompt, None)[1]
    assert whole.ids == prompt.ids
    start = prompt.spans[0].start  # of what is coded: the prefix is not
    assert taken["raw_bytes"] * len(whole.prefix) == kv.n_bytes * (len(whole.prefix) - start)
    assert kv.n_bytes == plain.n_bytes
    assert torch.equal(kv.keys[:, :, :start], plain.keys[:, :, :start])
    second = prompt.spans[1]
    expected, _ = by.through(
        ChunkKV(plain.keys[:, :, second.start : second.stop], plain.values[:, :, second.start : second.stop])
    )
    assert torch.equal(kv.keys[:, :, second.start : second.stop], expected.keys)


def test_a_run_draws_codecs_and_shows_them_on_its_page(done: Any) -> None:
    svg = (done.folder / "codecs.svg").read_text()
    assert "exact" in svg
    assert "uncoded" in svg
    assert plot(done.figures["methods"], "x", "png").startswith(b"\x89PNG")
    page = (done.folder / "report.html").read_text()
    assert page.count("data:image/svg+xml") == 2
    assert "KV smaller" in page


def test_codecs_begin_with_uncoded_kv(tmp_path: Path) -> None:
    engine = tiny_engine(config=changed(CONFIG, store=StoreConfig(codec="int8").model_dump()))
    with pytest.raises(ConfigError, match=r"store\.codec"):
        coded_store(engine, "int8")


def test_tables_are_the_runs_stores() -> None:
    pytest.importorskip("constriction")
    engine = tiny_engine(MemoryStore(2**30))
    with pytest.raises(TablesMissing, match="codec fit"):
        coded_store(engine, "cachegen@1")
    document = Document(" ".join(passage(n)["text"] for n in range(40)))
    chunks = chunks_of([document], 300, engine.config, engine.prompts)
    fit("cachegen", chunks, engine.reader, engine.prompts, engine.store)
    by = coded_store(engine, "cachegen@2")
    kv = ChunkKV(*(torch.randn(3, 2, 50, 16) for _ in range(2)))
    if by.codec._weights.fits(record.ChunkShape.of(kv)):  # type: ignore[attr-defined]
        assert by.through(kv)[1]["bytes"] < kv.n_bytes / 8
    assert by.store.stats().tables == 1
