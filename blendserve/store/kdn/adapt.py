"""By which level a chunk is to come, or whether computing it is quicker: pure functions of what was measured.

    seconds of a level = bytes / rate of the link + decoding          seconds of text = computing

Without a wanted TTFT the quickest is taken, the finest of those that are nearly as quick. With one, the finest that is
there in time, else the quickest. Between two layers the same is asked again of what is left: a link that has become
slower may make it worth to begin again at a smaller level, or to compute the chunk after all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

TEXT = ""  # the word of computing the chunk here
SAME = 1.05  # quicker by less than this is no quicker
WORTH = 0.75  # of what going on would take: less than this, and what has arrived is given up
SOONER = (
    0.9  # times what the rest takes to come: in less than this it is computed meanwhile, as estimates are off
)
IN_STEP = 2.0  # times what computing a chunk takes: less than that for all to come, and they come in step
WINDOW_S = 0.15  # of transfer that the rate is measured over


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to a chunk's KV. Offers are listed from the finest to the coarsest, text in front: it is exact."""

    word: str
    n_bytes: int  # still to come
    seconds: float  # to decode it, or to compute it


@dataclass(frozen=True, slots=True)
class Situation:
    """What a choice rests on."""

    bytes_per_s: float | None  # of the link, None while nothing is known of it
    last_bytes_per_s: float | None = None  # of the chunk before this one: what CacheGen chooses by
    wanted: float = (
        0.0  # seconds in which this and the request's other chunks are to be here; 0 = as soon as possible
    )
    share: float = 1.0  # of this chunk in what is still to come of the request
    spent: float = 0.0  # seconds of the request so far


class Rule(Protocol):
    """Chooses an offer's word."""

    def __call__(self, offers: Sequence[Offer], now: Situation, going_on: str | None = None) -> str:
        """going_on: the word of the offer that is under way, whose bytes are those that are left."""
        ...


def quickest(offers: Sequence[Offer], now: Situation, going_on: str | None = None) -> str:
    """Ours. Where nothing is known of the link, what has the fewest bytes tells most cheaply."""
    if now.bytes_per_s is None:
        coming = [offer for offer in offers if offer.word != TEXT] or offers
        return going_on if going_on is not None else min(coming, key=lambda offer: offer.n_bytes).word
    seconds = {offer.word: offer.n_bytes / now.bytes_per_s + offer.seconds for offer in offers}
    best = min(seconds.values())
    if going_on is not None and seconds[going_on] * WORTH <= best:
        return going_on
    room = max(SAME * best, (now.wanted - now.spent) * now.share)
    return next(word for word, took in seconds.items() if took <= room)


def outlasts(n_bytes: float, bytes_per_s: float | None, seconds: float) -> bool:
    """Whether so many bytes keep the link busy for so much longer that a chunk is better computed meanwhile.

    Of R bytes still to come, s of them the last chunk's, that leaves max(seconds, (R - s) / rate) to wait for in place of
    R / rate: it needs no more of an estimate, and a link that changes moves only the place where both ends meet.
    """
    return bytes_per_s is not None and seconds < SOONER * n_bytes / bytes_per_s


def comes_in_step(n_bytes: float, bytes_per_s: float | None, seconds: float) -> bool:
    """Whether chunks of so many bytes in all are better asked for in one call than two at a time. seconds: computing one.

    A prefill works on their first layers meanwhile; but nothing is left to choose anew or to compute, as a slower link
    wants it.
    """
    return bytes_per_s is not None and n_bytes / bytes_per_s < IN_STEP * seconds


def fixed(level: str) -> Rule:
    """Always the same level; what has none of that name is computed."""

    def rule(offers: Sequence[Offer], now: Situation, going_on: str | None = None) -> str:
        return level if any(offer.word == level for offer in offers) else TEXT

    return rule


class Meter:
    """The rate of a link, over its last moments of transfer. Time in which nothing is asked for does not count.

    All methods are told the time, in seconds of any clock. Not safe to share between threads.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window = window_s
        self._active, self._since, self._busy = 0, 0.0, 0.0  # transfers; busy seconds up to `since`
        self._pieces: deque[tuple[float, int]] = deque()  # busy seconds at their arrival, and bytes
        self._from = 0.0  # busy seconds that the pieces are counted from

    def begin(self, now: float, wait: float = 0.0) -> None:
        """A transfer begins, of which nothing can be here before `wait` is over."""
        self._tick(now)
        if not self._active:
            self._since += wait
        self._active += 1

    def end(self, now: float) -> None:
        """It has ended."""
        self._tick(now)
        self._active -= 1

    def arrived(self, n_bytes: int, now: float) -> None:
        """So many bytes of any of them."""
        self._tick(now)
        self._pieces.append((self._busy, n_bytes))
        while len(self._pieces) > 1 and self._pieces[0][0] < self._busy - self._window:
            self._from = self._pieces.popleft()[0]

    def forget(self, now: float) -> None:
        """All that has arrived; what is under way still is."""
        self._tick(now)
        self._pieces.clear()
        self._from = self._busy

    def bytes_per_s(self, now: float) -> float | None:
        """None while too little was seen; silence counts."""
        self._tick(now)
        seconds, n_bytes = self._busy - self._from, sum(n for _, n in self._pieces)
        return n_bytes / seconds if n_bytes and seconds > 0 else None

    def _tick(self, now: float) -> None:
        if self._active:
            self._busy += max(0.0, now - self._since)
        self._since = max(now, self._since) if self._active else now
