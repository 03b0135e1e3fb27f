"""What is asked for, against the law's own probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.simulate import draw
from blendserve.simulate.config import SimulateConfig


@pytest.mark.parametrize(("n", "s"), [(1, 1.0), (2, 0.0), (7, 0.5), (50, 1.0), (50, 1.7)])
def test_zipf_is_zipf(n: int, s: float) -> None:
    law = np.arange(1, n + 1) ** -s
    law /= law.sum()
    draws = 400_000
    drawn = np.bincount(draw.Zipf(n, s).draw(np.random.default_rng(0), draws), minlength=n) / draws
    assert len(drawn) == n
    assert (np.abs(drawn - law) < 5 * np.sqrt(law / draws)).all()  # five standard deviations


def test_a_corpus_of_a_billion_takes_no_table() -> None:
    """The share of the first thousand: harmonic numbers, by Euler's constant."""
    drawn = draw.Zipf(10**9, 1.0).draw(np.random.default_rng(0), 40_000)
    wanted = (np.log(1000) + 0.5772) / (np.log(1e9) + 0.5772)
    assert 0 <= drawn.min() <= drawn.max() < 10**9
    assert abs((drawn < 1000).mean() - wanted) < 0.012


@given(
    chunks=st.integers(1, 40),
    wanted=st.integers(1, 12),
    topic=st.integers(1, 50),
    coherence=st.sampled_from([0.0, 0.5, 1.0]),
    zipf=st.sampled_from([0.0, 1.0, 1.4]),
    lifetime=st.sampled_from([0, 7]),
)
def test_requests_have_different_chunks_of_the_corpus(
    chunks: int, wanted: int, topic: int, coherence: float, zipf: float, lifetime: int
) -> None:
    corpus = {
        **{"chunks": chunks, "zipf": zipf, "topic_chunks": topic, "coherence": coherence},
        "lifetime": lifetime,
    }
    config = SimulateConfig(corpus=corpus, requests={"number": 20, "chunks": min(chunks, wanted)})
    ((times, asked),) = draw.requests(config, 3)
    assert asked.shape == (20, min(chunks, wanted))
    assert asked.min() >= 0
    assert asked.max() < chunks
    assert all(len(set(row)) == len(row) for row in asked.tolist())
    assert (np.diff(times) >= 0).all()
    again = next(draw.requests(config, 5))
    assert (again[1] == asked).all()  # whatever the number of nodes
    assert np.allclose(again[0] * 5, times * 3)


def test_what_is_popular_changes() -> None:
    def favourite(lifetime: int, part: slice) -> int:
        corpus = {"chunks": 1000, "zipf": 1.5, "topic_chunks": 1, "lifetime": lifetime}
        config = SimulateConfig(corpus=corpus, requests={"number": 4000, "chunks": 2})
        ((_, asked),) = draw.requests(config, 1)
        return int(np.bincount(asked[part].ravel()).argmax())

    early, late = slice(0, 500), slice(3500, 4000)
    assert favourite(0, early) == favourite(0, late)
    assert favourite(1500, early) != favourite(1500, late)


def test_topics_are_asked_for_together() -> None:
    def same_topic(coherence: float) -> float:
        corpus = {"chunks": 10_000, "zipf": 0.0, "topic_chunks": 50, "coherence": coherence}
        config = SimulateConfig(corpus=corpus, requests={"number": 500, "chunks": 4})
        ((_, asked),) = draw.requests(config, 1)
        return float((asked[:, 0] // 50 == asked[:, 1] // 50).mean())

    assert same_topic(0.0) < 0.05
    assert same_topic(1.0) == 1.0
