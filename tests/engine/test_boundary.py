"""The public Python API with wrong types and values: every call works, or raises an error of errors.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blendserve.core import Document, Passage
from blendserve.engine.engine import Engine
from blendserve.errors import BlendserveError, InputError, StoreUnavailable
from blendserve.store import LMDBStore
from tests.support.engines import toy_engine

WORDS = "a text of some words "
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 3, 2**31, 2**63, 2**80, -(2**80)]),
    st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e308]),
    st.sampled_from(["", " ", "why?", "\ud800", "\0", "auto", "blend", "-5", WORDS * 2000]),
    st.sampled_from([b"bytes", [], [None], ["why?"], [["x"]], (), (0, 1), (0, "a"), (1, 1), {}, {"text": 1}]),
    st.sampled_from([Passage("\ud800"), Passage(None), Passage("t", 3), Document("t"), object()]),  # type: ignore[arg-type]
    st.sampled_from([[Passage("A passage.")], [Passage("\udfff")], [Passage(5)], [Document("x")]]),  # type: ignore[arg-type]
)
OPTIONS = (
    *("method", "policy", "ratio", "refine", "correction", "near"),
    *("max_new_tokens", "temperature", "top_p", "seed", "stop", "nonsense"),
)


@cache
def engine() -> Engine:
    return toy_engine(decode={"max_new_tokens": 2})


CALLS: dict[str, Callable[[Any], object]] = {
    "question": lambda value: engine().answer(value, ["A passage."]),
    "passages": lambda value: engine().answer("Why?", value),
    "a passage": lambda value: engine().answer("Why?", [value]),
    "top_k": lambda value: engine().answer("Why?", top_k=value),
    "logprobs": lambda value: engine().answer("Why?", logprobs=value),
    "precompute": lambda value: engine().precompute(value),
    "precompute a passage": lambda value: engine().precompute([value]),
    "shard": lambda value: engine().missing([Passage("A passage.")], value),
    "calibrate": lambda value: engine().calibrate(value),
    "calibrate by questions": lambda value: engine().calibrate(1, value),
    "tenant": lambda value: engine().tenant(value),
    "add": lambda value: engine().add(value),
    "add a document": lambda value: engine().add([value]),
    "delete": lambda value: engine().delete(value),
    "open": lambda value: Engine.open(value),
}


@pytest.mark.parametrize("call", CALLS)
@given(ANYTHING)
def test_a_wrong_argument_is_an_error_of_ours(call: str, value: Any) -> None:
    with suppress(BlendserveError):
        CALLS[call](value)


@pytest.mark.parametrize("name", OPTIONS)
@given(ANYTHING)
@example(2**80)
def test_a_wrong_option_is_an_error_of_ours(name: str, value: Any) -> None:
    with suppress(BlendserveError):
        options: dict[str, Any] = {"max_new_tokens": 2, "stop": ("a", "e", " "), name: value}
        engine().answer("Why?", ["A passage.", "Another one."], **options)


def test_a_passage_that_fits_no_prompt_is_not_precomputed() -> None:
    with toy_engine() as fresh:
        with pytest.raises(InputError):
            fresh.precompute([Passage(WORDS * fresh.model.decoder.context_limit)])
        assert fresh.store.stats().chunks == 0


def test_a_store_whose_writer_was_killed_at_once_does_not_exist_yet(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").touch()
    with pytest.raises(StoreUnavailable) as raised:
        LMDBStore(tmp_path, 1 << 20, read_only=True)
    assert raised.value.path == str(tmp_path)
    LMDBStore(tmp_path, 1 << 20).close()
