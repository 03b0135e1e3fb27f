"""Random texts of cuts, joins and edits of stored chunks: how much of them is found, and in whose chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from blendserve.blend import donors as donors_module
from blendserve.blend.blender import Blender
from blendserve.core import PLAIN_SUFFIX, Prompt, TokenIds
from tests.support.blending import VOCAB, some_ids, tiny_blender
from tests.support.plain import BLEND

LEAST = 48  # tokens of a run that counts
OWN = [some_ids(n, 7) for n in range(100, 340, 8)]
OTHERS = [some_ids(n, 8) for n in range(100, 200, 5)]  # of another scope


@pytest.fixture(scope="module")
def blender() -> Iterator[Blender]:
    """Of a scope that has learnt OWN, over a store in which another one has learnt OTHERS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(donors_module, "FIRST_WAIT_S", 60.0)
        made = tiny_blender(None, prefix=())
        scopes = [made.for_scope(scope, learns=True) for scope in ("own", "other")]
        for scope, chunks in zip(scopes, (OWN, OTHERS), strict=True):
            assert scope.learnt
            scope.learnt.precompute(chunks)
        yield scopes[0]


def some_text(drawn: random.Random) -> tuple[TokenIds, set[int]]:
    """Edited cuts of chunks, some of them of the other scope, joined; and the places of runs of OWN that count."""
    ids, counting = list[int](), set[int]()
    for _ in range(drawn.randint(1, 4)):
        chunks = OTHERS if drawn.random() < 0.2 else OWN
        chunk = drawn.choice(chunks)
        start = drawn.randrange(len(chunk) - 20)
        piece = list(chunk[start : drawn.randint(start + 20, len(chunk))])
        edits = sorted(drawn.sample(range(len(piece)), drawn.randrange(3)))
        for at in edits:
            piece[at] = 3 + (piece[at] - 2) % (VOCAB - 3)
        for before, stop in pairwise([-1, *edits, len(piece)]):
            if stop - before - 1 >= LEAST and chunks is OWN:
                counting.update(range(len(ids) + before + 1, len(ids) + stop))
        ids += [*piece, *some_ids(drawn.randrange(20), drawn.randrange(1 << 30))]
    return tuple(ids), counting


@pytest.mark.parametrize(
    "n_texts", [300, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])]
)
def test_nine_tenths_of_runs_are_found_none_is_false_and_none_of_another_scope(
    blender: Blender, n_texts: int
) -> None:
    drawn = random.Random(0)
    found = [n_found(blender, *some_text(drawn)) for _ in range(n_texts)]
    n_counting = sum(n for _, n in found)
    assert sum(n for n, _ in found) >= 0.9 * n_counting > 0


def n_found(blender: Blender, ids: TokenIds, counting: set[int]) -> tuple[int, int]:
    """How many of these places are in runs, and how many there are. Every run must be the stored text of OWN."""
    assert blender.learnt
    donors = {blender.learnt.key(stored): stored for stored in OWN}
    prompt = Prompt.plain((*ids, *some_ids(PLAIN_SUFFIX)))
    places = set[int]()
    for run in blender.match(prompt, BLEND).runs:
        stored = donors[run.donor][run.offset : run.offset + len(run.span)]  # a KeyError: of another scope
        assert prompt.ids[run.span.start : run.span.stop] == stored
        places.update(range(run.span.start, run.span.stop))
    return len(places & counting), len(counting)
