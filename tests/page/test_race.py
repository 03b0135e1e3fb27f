"""The first thing that a stranger does: click a question, and see it answered twice, side by side."""

from __future__ import annotations

import re
from itertools import takewhile

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.page.conftest import TIMEOUT_MS
from tests.support.engines import QUESTIONS, toy_model
from tests.support.http import DOCUMENTS, Server
from tests.support.pages import faults, states_of, stepped, visit
from tests.support.waiting import eventually

expect.set_options(timeout=TIMEOUT_MS)
METHODS = ["full", "prefix", "reuse", "blend"]
PHONE = {"width": 390, "height": 844}


def lane(page: Page, method: str) -> Locator:
    return page.locator(f".lane[data-method={method}]")


def progress(page: Page, method: str) -> Locator:
    return lane(page, method).get_by_role("progressbar")


def choose(page: Page) -> str:
    """Click the first question -> its text."""
    choices = page.locator("#landing button")
    expect(choices).to_have_count(3)
    question = choices.first.locator("span").first.text_content() or ""
    choices.first.click()
    return question


def reuses(page: Page, method: str) -> int:
    """Cells of the lane's field that are not computed."""
    reused = ".cells-exact, .cells-reused, .cells-corrected"
    return lane(page, method).locator(reused).count()


def words_in_common(one: str, other: str) -> int:
    pairs = zip(one.split(), other.split(), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_a_clicked_question_is_raced_in_two_lanes(page: Page, server: Server) -> None:
    """The blended answer is shown while full prefill computes, whose lane fills by its layers."""
    visit(page, server)
    n_layers = toy_model().decoder.n_layers
    with stepped(server, "full") as steps:
        question = choose(page)
        assert any(document.title in question for document in DOCUMENTS)
        expect(progress(page, "blend")).to_have_attribute("aria-valuenow", "100")
        for n in range(n_layers):
            steps.release()
            expect(progress(page, "full")).to_have_attribute("aria-valuenow", str(round(100 * n / n_layers)))
        expect(lane(page, "full").locator(".said")).to_be_empty()
        clock = lane(page, "full").locator(".clock")
        before = clock.text_content()
        eventually(lambda: clock.text_content() != before)
        assert reuses(page, "blend") > reuses(page, "full") == 0
        shown = lane(page, "blend").locator(".said").text_content()
    # Not before: the model's thread waits for the steps of full prefill.
    blended = server.ask(question, method="blend")
    assert shown
    assert blended["text"].startswith(shown)  # its last tokens may wait for a layer of full prefill
    full = server.ask(question, method="full")
    expect(lane(page, "full").locator(".said")).to_have_text(full["text"])
    states, n_tokens = states_of(blended["report"]), full["report"]["tokens_prompt"]
    expect(lane(page, "full").locator(".counted")).to_contain_text(f"{n_tokens} tokens")
    expect(lane(page, "blend").locator(".counted")).to_contain_text(
        f"{states['recomputed'] + states['computed']} tokens"
    )
    n = words_in_common(full["text"], blended["text"])
    differ = full["text"].split() != blended["text"].split()
    expect(page.locator("#race-result")).to_contain_text(str(n) if differ and n else "answers")
    assert (page.locator(".lane mark").count() > 0) == differ
    expect(page.locator("#ttft")).to_be_visible()  # then the blended answer, as any other
    expect(page.locator("#question")).to_have_value(question)
    page.reload()
    expect(page.locator("#landing button")).to_have_count(3)


def test_methods_are_compared_and_replayed(page: Page, server: Server) -> None:
    visit(page, server)
    page.fill("#question", QUESTIONS[0])
    page.get_by_role("button", name="Compare methods").click()
    replay = page.get_by_role("button", name="Replay")
    expect(replay).to_be_visible()
    assert page.locator(".lane").evaluate_all("all => all.map(lane => lane.dataset.method)") == METHODS
    for method in METHODS:
        whole = server.ask(method=method)
        states = states_of(whole["report"])
        expect(lane(page, method).locator(".said")).to_have_text(whole["text"])
        n_computed = states["recomputed"] + states["computed"]
        expect(lane(page, method).locator(".counted")).to_contain_text(f"{n_computed} token")
    shown = page.locator("#race").inner_text()
    replay.click()
    eventually(lambda: page.locator("#race").inner_text() == shown)  # it ends as the race did


def test_words_that_differ_are_found(page: Page, server: Server) -> None:
    """By hand: c is missing, and x is new."""
    visit(page, server)
    found = page.evaluate(
        """async () => {
            const {compareWords} = await import("/page/words.js");
            return [compareWords("a b\\nc d e", "a b d x  e"), compareWords("a b", "a b\\n"), compareWords("", "a")];
        }"""
    )
    marks = [[word.strip() for word, differs in found[0][side] if differs] for side in ("one", "other")]
    assert marks == [["c"], ["x"]]
    assert [(each["equal"], each["areEqual"]) for each in found] == [(2, False), (2, True), (0, False)]
    assert "".join(word for word, _ in found[0]["one"]) == "a b\nc d e"


@pytest.mark.parametrize("leave", ["stop", "close"])
def test_a_client_that_leaves_in_the_race_frees_its_slot(page: Page, server: Server, leave: str) -> None:
    visit(page, server)
    with stepped(server, "full") as steps:
        choose(page)
        expect(progress(page, "blend")).to_have_attribute("aria-valuenow", "100")
        assert not server.is_idle
        if leave == "stop":
            page.get_by_role("button", name="Stop").click()
            expect(page.get_by_role("button", name="Stop")).to_be_hidden()
            expect(lane(page, "full")).not_to_have_class(re.compile("running"))
        else:
            page.close()
        eventually(lambda: server.backend.in_use["running"] == 0)
        steps.release()  # of the one layer that has begun; the request ends before the next
        eventually(lambda: server.is_idle)


def test_a_race_without_stored_passages_says_so(page: Page, server: Server) -> None:
    chunks = server.get("/v1/cache/chunks?collection=a").json()["data"]
    server.post("/v1/cache/delete", {"collection": "a"}).raise_for_status()
    visit(page, server)
    choose(page)
    expect(lane(page, "blend").locator(".result")).to_contain_text(re.compile(r"\d passages? not cached"))
    expect(page.get_by_role("button", name=re.compile("^Cache these passages"))).to_be_visible()
    server.job("/v1/cache/warm", {"collection": "a", "ids": [chunk["id"] for chunk in chunks]})


def test_a_server_without_documents_leads_to_adding_some(page: Page, server: Server) -> None:
    documents = server.get("/v1/documents?collection=a").json()["data"]
    page.route(
        "**/v1/documents?*",
        lambda route: route.fulfill(json={"collection": "a", "total": 0, "offset": 0, "data": []}),
    )
    assert documents
    visit(page, server)
    page.locator("#landing a").click()
    expect(page.locator("#documents .drop")).to_be_visible()
    expect(page.locator("#tab-documents")).to_have_attribute("aria-selected", "true")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_state(page: Page, server: Server, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    visit(page, server)
    expect(page.locator("#landing button")).to_have_count(3)
    assert not faults(page)
    page.get_by_role("button", name="Options").click()
    assert not faults(page)
    with stepped(server, "full") as steps:
        choose(page)
        expect(progress(page, "blend")).to_have_attribute("aria-valuenow", "100")
        steps.release()
        assert not faults(page)
    expect(page.locator("#follow")).to_be_visible()
    assert not faults(page)
    page.route("**/v1/rag/query", lambda route: route.fulfill(status=400, json={"error": {"message": "no"}}))
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#ask .problem")).to_have_text("no")
    assert not faults(page)


def test_a_phone_shows_questions_race_and_answer_in_its_first_view(page: Page, server: Server) -> None:
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    visit(page, server)
    choices = page.locator("#landing button")
    expect(choices).to_have_count(3)
    assert bottom(choices.last) < PHONE["height"]
    assert bottom(page.locator("#question")) < PHONE["height"]
    page.fill("#question", QUESTIONS[0])
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#ttft")).to_be_visible()
    assert bottom(page.locator("#answer")) < PHONE["height"]
    page.reload()
    with stepped(server, "full") as steps:
        choose(page)
        expect(progress(page, "blend")).to_have_attribute("aria-valuenow", "100")
        steps.release()
        for method in ("blend", "full"):
            assert bottom(progress(page, method)) < PHONE["height"]
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    expect(page.locator("#ttft")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_race_is_run_by_keys_alone(page: Page, server: Server) -> None:
    visit(page, server)
    expect(page.locator("#landing button")).to_have_count(3)
    page.focus("#theme")
    page.keyboard.press("Tab")
    expect(page.locator("#landing button").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#follow")).to_be_visible()
    page.focus("#question")
    page.keyboard.press("Tab")
    expect(page.locator("#options-button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#method")).to_be_visible()
    page.focus("#follow")
    page.keyboard.type("And who else?")
    page.keyboard.press("Enter")
    expect(page.locator(".turns .asked")).to_have_count(2)


def bottom(element: Locator) -> float:
    """In the window, as it is scrolled."""
    box = element.bounding_box()
    assert box
    return box["y"] + box["height"]
