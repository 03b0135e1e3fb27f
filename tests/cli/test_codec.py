"""`blendserve codec`: from text to tables to coded KV, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendserve.registry import CODECS
from blendserve.store.codecs.base import known_codec
from tests.cli.test_commands import Run, corpus_lines, one_json, run, toy

__all__ = ["run", "toy"]
needs_constriction = pytest.mark.skipif(
    known_codec("cachegen") is None, reason="constriction is not installed: pip install 'blendserve[codecs]'"
)


def test_codecs_are_listed_with_their_levels(run: Run) -> None:
    code, out, _ = run("codec", "list", "--json")
    assert code == 0
    assert [codec["codec"] for codec in one_json(out)["codecs"]] == list(CODECS.names)
    assert run("codec", "list")[0] == 0


def test_what_cannot_be_fitted_is_told_with_the_way_out(run: Run, tmp_path: Path) -> None:
    for word, way in (("int8", "needs no tables"), ("int9", "did you mean 'int8'")):
        code, _, err = run("codec", "fit", tmp_path, "--codec", word)
        assert code == 2
        assert way in err
    store = ("--store", tmp_path / "kv")
    code, _, err = run(
        "codec", "fit", tmp_path, *store, "--codec", "cachegen", "--text", tmp_path / "nowhere"
    )
    assert code == 2
    assert "nowhere" in err
    code, _, err = run("codec", "fit", tmp_path / "no-index", "--codec", "predict")
    assert code == 2
    assert "blendserve index build" in err
    code, _, err = run("precompute", tmp_path, "--codec", "int8@5")
    assert code == 2
    assert "int8@0" in err


@needs_constriction
def test_fit_precompute_ask(run: Run, toy: None, tmp_path: Path) -> None:
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text(corpus_lines(3))
    assert run("index", "build", corpus, index)[0] == 0
    code, out, _ = run(
        "codec", "fit", index, "--codec", "cachegen", "--text", corpus, "--tokens", 200, "--json"
    )
    assert code == 0
    fitted = one_json(out)["tables"]
    assert [tables["codec"] for tables in fitted] == ["cachegen"]
    shown = one_json(run("codec", "show", index, "--json")[1])["tables"]
    assert [(t["hash"], t["bytes"], t["current"]) for t in shown] == [
        (fitted[0]["hash"], fitted[0]["bytes"], True)
    ]
    assert run("codec", "show", index)[0] == 0
    code, out, err = run("precompute", index, "--codec", "cachegen@2", "--json")
    assert code == 0
    assert "Fitting" not in err
    stats = one_json(run("store", "stats", index, "--json")[1])
    assert stats["chunks"] == 4
    assert stats["raw_bytes"] > 5 * stats["bytes"]  # the prefix is not coded
    assert stats["tables_bytes"] == fitted[0]["bytes"]
    assert one_json(run("store", "verify", index, "--json")[1])["bad_tables"] == []
    answer = one_json(run("ask", "Where was the bee?", "-i", index, "--json", "--max-new-tokens", "3")[1])
    assert answer["report"]["chunks_hit"] == 3
