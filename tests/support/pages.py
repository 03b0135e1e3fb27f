"""What users do on the page, and what the page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Semaphore
from typing import Any
from unittest.mock import patch

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from blendserve.engine.generate import TokenSequence
from tests.support.engines import QUESTIONS
from tests.support.http import PATIENT_S, Server
from tests.support.waiting import eventually

VIEWS = ("ask", "store", "documents", "load")
MANY = 10**6


def visit(page: Page, server: Server, view: str = "ask") -> None:
    page.goto(f"{server.url}/#{view}")
    expect(page.locator("#about")).to_contain_text("tiny")


def open_options(page: Page) -> None:
    page.get_by_role("button", name="Options").click()
    expect(page.locator("#method")).to_be_visible()


def ask(page: Page, question: str = QUESTIONS[0], wait: bool = True) -> None:
    page.fill("#question", question)
    page.get_by_role("button", name="Ask", exact=True).click()
    if wait:
        expect(page.locator("#ttft")).to_be_visible()


def rows(page: Page, view: str) -> Locator:
    return page.locator(f"#{view} tbody tr")


def letters(text: str | None) -> str:
    """A text without its white space and its Markdown."""
    return "".join(filter(str.isalnum, text or ""))


def states_shown(page: Page) -> Counter[str]:
    """Tokens by the state that their run is drawn in."""
    found = "runs => runs.flatMap(run => Array(run.children.length).fill(run.className))"
    return Counter(name.removeprefix("run s-") for name in page.eval_on_selector_all("#prompt .run", found))


def states_of(report: dict[str, Any]) -> Counter[str]:
    """The same by the report's sums."""
    return +Counter(
        exact=report["tokens_exact"],
        corrected=report["tokens_reused"],
        recomputed=report["tokens_recomputed"],
        computed=report["tokens_computed"] + report["tokens_suffix"],
    )


def faults(page: Page, *rules: str) -> list[tuple[str, str]]:
    """What axe-core finds, of all rules or of these: the rule, and where."""
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found = Axe().run(page, options=options).response["violations"]
    return [(violation["id"], violation["nodes"][0]["html"]) for violation in found]


@contextmanager
def stepped(server: Server, method: str) -> Iterator[Semaphore]:
    """Prefills by this method run a layer for each `release`; the rest of them at the end of the block.

    Prefills of pages that were left end before it.
    """
    eventually(lambda: server.is_idle)
    steps, advance = Semaphore(0), TokenSequence.advance

    def step(sequence: TokenSequence) -> None:
        if sequence.request.blend.method == method and sequence.prefilled is None:
            assert steps.acquire(timeout=PATIENT_S)
        advance(sequence)

    with patch.object(TokenSequence, "advance", step):
        try:
            yield steps
        finally:
            steps.release(MANY)
