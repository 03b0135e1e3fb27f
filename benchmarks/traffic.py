"""`python -m benchmarks traffic`: what a server without an index makes of traffic: learning, many orders, agents.

    learning   nothing is stored; questions about passages in a new order each. Of each prompt, the share that is found
    orders     all passages are stored; many orders that were never seen: the time stays, and so does the store
    agent      conversations whose turns bring the results of a search, against prefix caching alone
    code       an agent that reads, searches and edits the source files of a package, against prefix caching alone; then
               the same conversations in this process, against full prefill

The messages are those of LangChain's chain and of an agent with a search tool. The server learns in the pauses between
questions.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count as counter
from itertools import product
from pathlib import Path
from typing import Literal

from pydantic import Field

from benchmarks.plain import FULL, PLAIN, PREFIX, ROOM, model_settings, warm
from benchmarks.support.agreement import CheckedTalk, CheckedTurn
from benchmarks.support.clients import CHAT, Body, Sent, Wire, chat, user
from benchmarks.support.coding_agent import CodingAgent, source_files
from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, count, ms, ratio, speedup, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.server_process import FIXED, ServerProcess, serve_command
from blendserve.config import Config, Positive, PromptConfig
from blendserve.engine.engine import Engine
from blendserve.engine.prompt import PromptBuilder
from blendserve.engine.text_forms import FORMS
from blendserve.models.loader import LoadedModel
from blendserve.retrieve import language_reference
from blendserve.timing import Clock

SYSTEM = "Use the following pieces of context to answer the question at the end.\n\n"
PHASES = 5  # of questions
KEPT_MB = 4096  # for the KV of conversations
STORE = "kv"  # folder of the server's store
PIECE_CHARS = 3000  # of a file that is warmed


class TrafficConfig(BenchConfig):
    """What plain prompts leave behind."""

    parts: tuple[Literal["learning", "agent", "orders", "code"], ...] = Field(
        ("learning", "agent", "orders", "code"), description="Parts to run."
    )
    passages: Positive = Field(200, description="Number of passages.")
    chunk_tokens: Positive = Field(512, description="Length of a passage, in tokens.")
    asked: Positive = Field(6, description="Number of passages in a prompt.")
    questions: Positive = Field(200, description="Number of questions while the server learns.")
    pause_s: float = Field(1.0, ge=0, description="Pause after each of these questions, in seconds.")
    orders: Positive = Field(500, description="Number of questions about stored passages.")
    turns: Positive = Field(6, description="Number of turns of an agent's conversation.")
    code_turns: Positive = Field(30, description="Number of turns of a coding agent.")
    package: str = Field("httpx", description="Package whose source files a coding agent reads.")
    kept_chars: Positive = Field(
        16_000, description="Characters of a coding agent's history before it is cut."
    )
    searched: Positive = Field(2, description="Number of passages that a turn brings.")
    repeats: Positive = Field(3, description="Number of conversations of each kind.")
    new_tokens: Positive = Field(4, description="Length of an answer, in tokens.")


def groups(config: TrafficConfig, log: SampleLog) -> Iterator[Group]:
    model = open_model(config, log)
    texts = passages(model, 2 * config.passages, config.chunk_tokens, config.seed)
    known, new = texts[: config.passages], texts[config.passages :]
    if "learning" in config.parts:
        with scratch(config.folder) as folder, server(config, folder) as wire:
            yield from _learning(config, Questions(config, wire, known))
    if {"agent", "orders"} & set(config.parts):
        with scratch(config.folder) as folder, server(config, folder) as wire:
            warm(wire.http, known)
            if "agent" in config.parts:
                yield from _agents(config, wire, {"stored": known, "new": new})
            if "orders" in config.parts:
                yield from _orders(config, Questions(config, wire, known))
    if "code" in config.parts:
        yield from _coding(config, model)


def passages(model: LoadedModel, n: int, n_tokens: int, seed: int) -> list[str]:
    """Passages of about `n_tokens` tokens with no text in common: words of the language reference, in a random order."""
    words = " ".join(document.text for document in language_reference()).split()
    prompts = PromptBuilder(model.tokenizer, PromptConfig())
    n_words = round(n_tokens * len(words) / len(prompts.text_ids(" ".join(words))))
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(words, k=n_words)) for _ in range(n)]


@contextmanager
def server(config: TrafficConfig, folder: Path) -> Iterator[Wire]:
    """One with its store in this folder, and with memory for all conversations of a phase."""
    options = ("--no-index", *ROOM, "--model", config.model, *model_settings(config))
    own = ("--set", f"serve.conversations_mb={KEPT_MB}", "--set", f"store.location={folder / STORE}")
    with ServerProcess(serve_command(*options, *own, *FIXED), folder / "log") as process:
        yield Wire(process.url, config.model, config.new_tokens)


def _learning(config: TrafficConfig, questions: Questions) -> Iterator[Group]:
    case = Case({"sent": PLAIN}, partial(questions.ask, {}, config.pause_s))
    for label, n in _phases(config.questions):
        yield Group(
            {"traffic": "learning", "questions": label}, [case], questions.stored, repeats=n, warm_up=False
        )


def _orders(config: TrafficConfig, questions: Questions) -> Iterator[Group]:
    plain = Case({"sent": PLAIN}, partial(questions.ask, {}))
    full = Case({"sent": FULL}, partial(questions.ask, {"x_blendserve": {"method": "full"}}))
    yield Group({"traffic": "orders", "questions": "before"}, [plain, full])
    for label, n in _phases(config.orders):
        yield Group(
            {"traffic": "orders", "questions": label}, [plain], questions.stored, repeats=n, warm_up=False
        )
    yield Group({"traffic": "orders", "questions": "after"}, [plain, full])


def _phases(n: int) -> Iterator[tuple[str, int]]:
    size = -(-n // PHASES)
    for first in range(0, n, size):
        last = min(n, first + size)
        yield f"{first + 1} to {last}", last - first


def _agents(config: TrafficConfig, wire: Wire, found: Mapping[str, Sequence[str]]) -> Iterator[Group]:
    """Turn by turn: the same conversations by kept prefixes, and by exact ones alone."""
    talks = {
        (what, sent): Conversations(config, wire, texts, sent)
        for what, texts in found.items()
        for sent in (PLAIN, PREFIX)
    }
    for turn, what in product(range(1, config.turns + 1), found):
        cases = [
            Case({"sent": sent}, partial(talks[what, sent].go_on, counter())) for sent in (PLAIN, PREFIX)
        ]
        yield Group({"traffic": "agent", "passages": what, "turn": turn}, cases, warm_up=False)


def _coding(config: TrafficConfig, model: LoadedModel) -> Iterator[Group]:
    """Turn by turn: the same conversations with an agent whose files are warmed, or learnt, and by prefixes alone."""
    sources = source_files(config.package)
    for files in ("warmed", "learnt"):
        with scratch(config.folder) as folder:
            with server(config, folder) as wire:
                if files == "warmed":
                    warm(wire.http, [piece for text in sources.values() for piece in _pieces(text)])
                talks = {sent: CodingTalks(config, wire, sources, sent) for sent in (PLAIN, PREFIX)}
                for turn in range(1, config.code_turns + 1):
                    cases = [
                        Case({"sent": sent}, partial(talk.go_on, counter())) for sent, talk in talks.items()
                    ]
                    yield Group({"traffic": "code", "files": files, "turn": turn}, cases, warm_up=False)
            yield from _agreement(config, model, sources, files, folder)


def _agreement(
    config: TrafficConfig, model: LoadedModel, sources: dict[str, str], files: str, folder: Path
) -> Iterator[Group]:
    """Turn by turn: how near the answers over a server's store are to full prefill. folder: the server's."""
    setting, _, value = FIXED[-1].partition("=")
    own = {"location": str(folder / STORE)}
    settings = Config(model=config.model_settings, store=own).replace(setting, float(value))
    with Engine.open(settings, model=model) as engine:
        engine.blender.prefixes.cap_bytes = KEPT_MB * 10**6
        talks = CheckedTalks(config, engine, sources)
        for turn in range(1, config.code_turns + 1):
            case = Case({"sent": PLAIN}, partial(talks.go_on, turn, counter()))
            facts = talks.worst if turn == config.code_turns else dict
            labels = {"traffic": "code, agreement", "files": files, "turn": turn}
            yield Group(labels, [case], facts, warm_up=False)


def _pieces(text: str) -> Iterator[str]:
    """A file in each form that the agent reads, in pieces that fit the context."""
    for form in (FORMS["plain"], FORMS["numbered"], FORMS["ascii_json"]):
        written = form(text)
        yield from (written[at : at + PIECE_CHARS] for at in range(0, len(written), PIECE_CHARS))


class Questions:
    """LangChain's prompt about passages in an order that is new each time."""

    def __init__(self, config: TrafficConfig, wire: Wire, texts: Sequence[str]) -> None:
        self._config, self._wire, self._texts, self._numbers = config, wire, texts, counter()

    def ask(self, more: Body, pause_s: float = 0.0) -> Metrics:
        """more: fields of the request. pause_s: behind the answer."""
        drawn = random.Random(next(self._numbers))
        texts = drawn.sample(self._texts, min(self._config.asked, len(self._texts)))
        system = {"role": "system", "content": SYSTEM + "\n\n".join(texts)}
        sent = chat(system, user(f"What is said about {texts[0][:40]!r}?"))
        metrics, _ = timed(self._wire, sent._replace(body={**sent.body, **more}))
        time.sleep(pause_s)
        return metrics

    def stored(self) -> dict[str, float]:
        """The tokens in the store as a share of the corpus, and its bytes."""
        store = self._wire.http.get("/v1/cache/stats").json()["store"]
        corpus = self._config.passages * self._config.chunk_tokens
        return {"stored tokens / corpus": round(store["tokens"] / corpus, 2), "stored bytes": store["bytes"]}


class Conversations:
    """Conversations with an agent, each in a scope of its own."""

    def __init__(self, config: TrafficConfig, wire: Wire, texts: Sequence[str], sent: str) -> None:
        self._config, self._wire, self._texts, self._sent = config, wire, texts, sent
        self._messages: dict[int, list[Body]] = {}

    def go_on(self, numbers: Iterator[int]) -> Metrics:
        """The next turn of the next conversation: a question, and what the agent found."""
        n = next(numbers)
        messages = self._messages.setdefault(n, [{"role": "system", "content": "Search, then answer."}])
        drawn = random.Random(f"{n} {len(messages)}")
        found = "\n\n".join(drawn.sample(self._texts, min(self._config.searched, len(self._texts))))
        messages += [user(f"Question {len(messages)}: what is said?"), {"role": "tool", "content": found}]
        own: Body = {"cache_salt": f"{n} {id(self)}"}
        own |= {"x_blendserve": {"method": "prefix"}} if self._sent == PREFIX else {}
        metrics, answer = timed(self._wire, Sent(CHAT, {"messages": messages, **own}))
        messages.append({"role": "assistant", "content": answer})
        return metrics


class CodingTalk:
    """The messages of a conversation with a coding agent, whose history is cut when it is long."""

    def __init__(self, config: TrafficConfig, sources: dict[str, str], n: int) -> None:
        self._kept_chars = config.kept_chars
        self._agent = CodingAgent(sources, f"{config.seed} {n}")
        self._messages: list[Body] = [{"role": "system", "content": "You edit code by tools."}]

    def next_turn(self) -> list[Body]:
        """The messages up to the next step of the agent."""
        if sum(len(message["content"]) for message in self._messages) > self._kept_chars:
            self._messages[1:-6] = [user("What came before was read and edited.")]
        asked, found = self._agent.next_result()
        self._messages += [user(asked), {"role": "tool", "content": found}]
        return self._messages

    def add_answer(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


class CodingTalks:
    """Conversations with a coding agent, each in a scope of its own."""

    def __init__(self, config: TrafficConfig, wire: Wire, sources: dict[str, str], sent: str) -> None:
        self._config, self._wire, self._sources, self._sent = config, wire, sources, sent
        self._talks: dict[int, CodingTalk] = {}

    def go_on(self, numbers: Iterator[int]) -> Metrics:
        """The next turn of the next conversation: a step of the agent."""
        n = next(numbers)
        talk = self._talks.setdefault(n, CodingTalk(self._config, self._sources, n))
        own: Body = {"cache_salt": f"{n} {id(self)}"}
        own |= {"x_blendserve": {"method": "prefix"}} if self._sent == PREFIX else {}
        metrics, answer = timed(self._wire, Sent(CHAT, {"messages": talk.next_turn(), **own}))
        talk.add_answer(answer)
        return metrics


class CheckedTalks:
    """The same conversations in this process, each turn compared with full prefill."""

    def __init__(self, config: TrafficConfig, engine: Engine, sources: dict[str, str]) -> None:
        self._config, self._engine, self._sources = config, engine, sources
        self._talks: dict[int, tuple[CodingTalk, CheckedTalk]] = {}
        self._turns = defaultdict[int, list[CheckedTurn]](list)

    def go_on(self, turn: int, numbers: Iterator[int]) -> Metrics:
        """This turn of the next conversation; turns before it that an interrupted run has measured are made again."""
        n = next(numbers)
        turns = self._turns[n]
        while len(turns) < turn:
            turns.append(self._next(n))
        return turns[turn - 1].metrics

    def _next(self, n: int) -> CheckedTurn:
        config = self._config
        made = CodingTalk(config, self._sources, n), CheckedTalk(self._engine, f"{n}", config.new_tokens)
        talk, checked = self._talks.setdefault(n, made)
        done = checked.ask(Sent(CHAT, {"model": config.model, "messages": talk.next_turn()}).chat)
        talk.add_answer(done.answer)
        return done

    def worst(self) -> dict[str, float]:
        """The turn with the least agreement, and that with the largest KL."""
        turns = [(found.served, n) for turns in self._turns.values() for n, found in enumerate(turns, 1)]
        least, at_least = min(turns, key=lambda turn: turn[0].agreement)
        largest, at_largest = max(turns, key=lambda turn: turn[0].kl)
        return {
            "worst turn by agreement": at_least,
            "its agreement": round(least.agreement, 3),
            "worst turn by KL": at_largest,
            "its KL, nats": round(largest.kl, 3),
        }


def timed(wire: Wire, sent: Sent) -> tuple[Metrics, str]:
    """From the request to the first text, or to the end of an answer without any; what was found; the answer."""
    pieces, clock = list[tuple[float, str]](), Clock()
    wire.stream(sent, lambda text: pieces.append((clock.elapsed(), text)) if text else None)
    ttft_s, report = pieces[0][0] if pieces else clock.elapsed(), wire.report
    n, kept = report["tokens_prompt"], report["tokens_kept"]
    n_new = n - kept - report["tokens_exact"]
    metrics = {
        "ttft_s": ttft_s,
        "found": wire.n_matched / n,
        "kept": kept / n,
        "found_new": wire.n_matched / n_new,
    }
    return metrics, "".join(text for _, text in pieces)


SHARE = count("share of the prompt found", "found", digits=2)
TABLES = (
    table("Learning from traffic", SHARE, ms("TTFT ms", "ttft_s"), traffic="learning"),
    table(
        "Orders that were never seen",
        SHARE,
        ms("TTFT ms", "ttft_s"),
        speedup("times sooner than full prefill", "ttft_s", sent=FULL),
        traffic="orders",
    ),
    table(
        "An agent's turns",
        SHARE,
        count("share kept", "kept", digits=2),
        ms("TTFT ms", "ttft_s"),
        ratio("/ exact prefix alone", "ttft_s", sent=PREFIX),
        traffic="agent",
    ),
    table(
        "A coding agent's turns",
        count("share of the new tokens found", "found_new", digits=2),
        ms("TTFT ms", "ttft_s"),
        ratio("/ exact prefix alone", "ttft_s", sent=PREFIX),
        traffic="code",
    ),
    table(
        "A coding agent's turns, against full prefill",
        count("tokens behind the prefix", "new"),
        count("share reused", "reused", digits=2),
        Column("agreement", "agreement"),
        Column("KL, nats", "kl", digits=3),
        Column("KL / full reuse's", "kl_share"),
        traffic="code, agreement",
    ),
)
TINY = {
    **{"passages": 8, "chunk_tokens": 80, "asked": 3, "questions": 4, "pause_s": 0.0},
    **{"orders": 4, "turns": 2, "searched": 1, "repeats": 1, "code_turns": 2, "kept_chars": 4000},
}
BENCH = Bench(TrafficConfig, groups, TABLES, tiny=TINY)
