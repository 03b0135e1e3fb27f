"""The view of one answer: its time against full prefill's, its Markdown, and the conversation that it belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Request, Route, expect

from blendserve.blend.cost import CostModel
from blendserve.blend.planner import Planner
from tests.page.conftest import TIMEOUT_MS
from tests.support.engines import QUESTIONS
from tests.support.http import Server, serving
from tests.support.pages import ask, letters, open_options, states_shown, visit
from tests.support.plain import PARAGRAPHS

expect.set_options(timeout=TIMEOUT_MS)
MARKDOWN = """Two *kinds* of **loops**:

1. `for` loops
   over lists
2. while loops
   - endless
   - others

# An example
```python
for x in y:
    print("<b>*x*</b>")
```
a < b and <img src=x onerror='window.harmed=1'> 2*3*4
- last
"""


def follow(page: Page, question: str) -> None:
    page.fill("#follow", question)
    page.get_by_role("button", name="Ask the follow-up").click()
    expect(page.locator(".turns .asked").last).to_have_text(question)
    expect(page.locator("#ttft")).to_be_visible()


def test_a_follow_up_question_has_the_turns_before_it(page: Page, server: Server) -> None:
    bodies = list[dict[str, Any]]()

    def sent(request: Request) -> None:
        if "rag/query" in request.url:
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", sent)
    visit(page, server)
    ask(page)
    first = server.ask()["text"]
    follow(page, QUESTIONS[1])
    said = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": first}]
    assert [body.get("history") for body in bodies] == [None, said]
    second = server.ask(QUESTIONS[1], history=said)
    assert letters(page.locator(".turns .prose").text_content()) == letters(first)
    assert letters(page.locator("#answer").text_content()) == letters(second["text"])
    shown = "".join(page.locator("#prompt [data-i]").all_text_contents()).replace("↵", "")
    assert QUESTIONS[0] in shown
    assert QUESTIONS[1] in shown
    follow(page, QUESTIONS[2])
    assert len(bodies[-1]["history"]) == 4
    ask(page, QUESTIONS[3])  # the question on top begins anew
    assert "history" not in bodies[-1]
    expect(page.locator(".turns .asked")).to_have_text([QUESTIONS[3]])


def test_a_turn_after_a_blended_one_is_not_said_to_be_exact(page: Page, server: Server) -> None:
    server.warm([{"text": PARAGRAPHS[1]}])
    visit(page, server)
    open_options(page)
    page.get_by_label("Plain prompt").check()
    page.select_option("#method", "blend")
    ask(page, f"Read this first. {PARAGRAPHS[1]} What is kept?")
    follow(page, "And why?")
    expect(page.locator("#exactness")).to_have_attribute("data-exact", "false")
    states = states_shown(page)
    assert states["kept"] > states["corrected"] == 0  # nothing is blended in this turn
    expect(page.locator("#exactness")).to_contain_text(f"{states['kept']:,}")
    page.select_option("#method", "full")
    ask(page, "What is full?")
    expect(page.locator("#exactness")).to_have_attribute("data-exact", "true")


def test_an_answer_says_what_full_prefill_would_take(page: Page, tmp_path: Path) -> None:
    """By a cost model of 1000 s per token, against which all else is nothing; without a cost model, it says nothing."""
    with serving(tmp_path) as own:
        visit(page, own)
        ask(page)
        assert "about" not in (page.locator(".ttft").text_content() or "")
    with serving(tmp_path) as own:
        decoder, costs = own.engine.model.decoder, CostModel(0.0, 1e3, 0.0, 0.0)
        own.engine.blender.planner = Planner(decoder, "", costs)
        visit(page, own)
        ask(page)
        n_tokens = own.ask()["report"]["tokens_prompt"]
        seconds = float(f"{n_tokens * 1e3:.2g}")
        expect(page.locator(".ttft")).to_contain_text(f"{seconds:,.0f} s")


def test_markdown_becomes_elements_and_html_stays_text(page: Page, server: Server) -> None:
    def answered(route: Route) -> None:
        events = [
            {"event": "passages", "passages": [], "tokens": 3},
            {"event": "text", "text": MARKDOWN[:60]},
            {"event": "done", **server.ask(), "text": MARKDOWN},
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(body=body, content_type="text/event-stream")

    visit(page, server)
    page.route("**/v1/rag/query", answered)
    ask(page)
    answer = page.locator("#answer")
    assert answer.locator("pre code").text_content() == 'for x in y:\n    print("<b>*x*</b>")'
    assert answer.locator("> ol > li").count() == 2
    assert "over lists" in answer.locator("> ol > li").first.inner_text()
    assert answer.locator("ol li ul li").all_inner_texts() == ["endless", "others"]
    assert answer.locator("> ul > li").all_inner_texts() == ["last"]
    assert answer.locator("p em, p strong").all_inner_texts() == ["kinds", "loops", "3"]
    assert answer.locator("img, b, script").count() == 0
    assert page.evaluate("window.harmed") is None
    expect(answer).to_contain_text("a < b and <img src=x")


def test_sentences_name_the_passages_they_rest_on(page: Page, server: Server) -> None:
    done = server.ask()
    text = "\U0001f41d *Bees* dance. Nobody knows."
    citation = {"start": 0, "end": 15, "passage": 1, "quote_start": 0, "quote_end": 4, "quote": "<b>"}

    def answered(route: Route) -> None:
        events = [
            {"event": "passages", "passages": done["passages"], "tokens": 3},
            {"event": "done", **done, "text": text, "citations": [citation]},
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(body=body, content_type="text/event-stream")

    visit(page, server)
    page.route("**/v1/rag/query", answered)
    ask(page)
    mark = page.locator("#answer .cite")
    expect(mark).to_have_text("2")
    expect(mark).to_have_attribute("title", "<b>")
    expect(page.locator("#answer")).to_have_text("\U0001f41d Bees dance.2 Nobody knows.")
    page.locator("#passage-2").evaluate("element => element.style.marginTop = '3000px'")
    expect(page.locator("#passage-2")).not_to_be_in_viewport()
    mark.click()
    expect(page.locator("#passage-2")).to_be_in_viewport()
