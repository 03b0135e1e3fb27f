"""What a reader says by itself: as many tokens as asked for, the same each time, and none that controls a chat."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendserve.engine import own_words as module
from blendserve.engine.own_words import FREQUENT, own_words, primer_ids
from tests.engine.helpers import reader

LENGTH, TOGETHER = 16, 4


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LENGTH", LENGTH)
    monkeypatch.setattr(module, "TOGETHER", TOGETHER)


@pytest.mark.parametrize("tokens", [1, LENGTH, LENGTH + 1, TOGETHER * LENGTH + 18])
def test_so_many_tokens_the_same_each_time(tokens: int) -> None:
    seen: list[tuple[int, int]] = []
    said = own_words(reader(), tokens, lambda *update: seen.append(update))
    assert sum(map(len, said)) == tokens
    assert seen[-1] == (tokens, tokens)
    assert seen == sorted(seen)
    assert own_words(reader(), tokens) == said
    assert len({text[0] for text in said}) == len(said)


def test_every_other_text_stands_behind_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text goes on as the model's own forward would, behind nothing or behind the passages, which are not in it."""
    made = reader()
    passages = primer_ids(made)
    assert made.tokenizer.decode(passages).startswith("Marguerite Halloway\n")

    def likeliest(shares: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
        return (
            shares.argmax(dim=1, keepdim=True)
            if shares.shape[1] > FREQUENT
            else drawn(shares, n, generator=generator)
        )

    drawn = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", likeliest)
    texts = own_words(made, TOGETHER * LENGTH)
    for n, text in enumerate(texts):
        before = [*(passages if n % 2 else ()), *text[:-1]]
        logits = made.adapter.model(torch.tensor([before])).logits[0, -(LENGTH - 1) :]
        logits[:, sorted(made.end_tokens)] = -torch.inf
        control = [i for i, token in made.tokenizer.added_tokens_decoder.items() if token.special]
        logits[:, control] = -torch.inf
        assert text[1:] == tuple(logits.argmax(dim=-1).tolist())


def test_passages_leave_room_for_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    made, whole = reader(), primer_ids(reader())
    for room, kept in ((100, whole[-100:]), (0, ()), (-1, ())):
        monkeypatch.setattr(made.adapter, "context_limit", LENGTH + room)
        assert primer_ids(made) == kept


def test_a_token_comes_as_often_as_the_reader_would_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind any token the reader here says 3 three times as often as 5; 7 it would say oftenest, and may not."""
    says: Any = SimpleNamespace(
        adapter=reader().adapter,
        tokenizer=SimpleNamespace(added_tokens_decoder={7: SimpleNamespace(special=True)}),
        end_tokens=frozenset({9}),
    )
    logits = torch.full((says.adapter.vocab_size,), -torch.inf)
    logits[[3, 5, 7, 9]] = torch.tensor([0.75, 0.25, 8.0, 8.0]).log()
    monkeypatch.setattr(module, "primer_ids", lambda reader: ())
    monkeypatch.setattr(module, "append_each", lambda adapter, rows: logits.expand(len(rows), -1))
    counts = Counter(token for text in own_words(says, 100 * LENGTH) for token in text[1:])
    assert set(counts) == {3, 5}
    assert counts[3] / counts[5] == pytest.approx(3.0, rel=0.2)
