"""The page in a real browser: what users do, and what the page shows of the API's answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from blendserve.core import Passage
from tests.page.conftest import TIMEOUT_MS
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import OWN, Server, serving
from tests.support.pages import (
    VIEWS,
    ask,
    faults,
    letters,
    open_options,
    rows,
    states_of,
    states_shown,
    visit,
)
from tests.support.plain import PARAGRAPHS
from tests.support.waiting import eventually

expect.set_options(timeout=TIMEOUT_MS)
MARKUP = "</p><img src=x onerror='window.harmed=1'><script>window.harmed=1</script> **&amp;** {{7*7}} heron"


def test_a_plain_prompt_shows_the_stored_text_that_is_in_it(page: Page, server: Server) -> None:
    server.warm([{"text": PARAGRAPHS[0]}])
    visit(page, server)
    open_options(page)
    page.get_by_label("Plain prompt").check()
    page.select_option("#method", "blend")
    ask(page, f"Read this first. {PARAGRAPHS[0]} What is kept?")
    assert page.locator(".part h3").all_text_contents() == ["prefix", "passage", "suffix"]
    assert states_shown(page)["corrected"] > 100
    page.get_by_label("Plain prompt").uncheck()
    ask(page)
    assert len(page.locator(".part h3").all_text_contents()) > 3


def test_a_question_is_answered_and_explained_token_by_token(page: Page, server: Server) -> None:
    whole = server.ask(explain=True)
    visit(page, server)
    page.evaluate(
        """() => {
            const answer = document.getElementById("answer");
            window.said = [];
            new MutationObserver(() => window.said.push(answer.textContent)).observe(answer, {childList: true});
        }"""
    )
    ask(page)
    assert letters(page.locator("#answer").text_content()) == letters(whole["text"])
    said = {letters(text) for text in page.evaluate("window.said")}
    parts = {text for text in said if letters(whole["text"]).startswith(text) and text}
    assert len(parts) > 2  # it came piece by piece
    assert states_shown(page) == states_of(whole["report"])
    for state, n in states_shown(page).items():
        expect(page.locator(f".key[data-state={state}]")).to_contain_text(f"{n:,}")
    shown = page.locator("#prompt [data-i]").all_text_contents()
    assert [text.replace("↵\n", "\n").replace("↵", "\n") for text in shown] == whole["explanation"]["tokens"]
    assert page.locator(".stages li").count() > 0
    assert page.locator(".part h3").all_text_contents()[1:-1] == [p["title"] for p in whole["passages"]]


def test_an_answer_is_checked_against_full_prefill(page: Page, server: Server) -> None:
    """All tokens of full prefill agree; of full reuse, the same ones as by the API."""
    visit(page, server)
    open_options(page)
    for method in ("full", "reuse"):
        page.select_option("#method", method)
        ask(page)
        page.get_by_role("button", name="Check this answer").click()
        check = server.ask(method=method, check=True)["check"]
        expect(page.locator("#check p")).to_be_visible()
        others = [text for text, full in check["tokens"] if full is not None]
        assert page.locator("#check mark").all_text_contents() == others
        assert page.locator("#check p").text_content() == "".join(text for text, _ in check["tokens"])
        assert (check["agreement"] == 1.0) == (others == [])
    assert others  # a random model reuses badly


def test_a_tokens_tip_opens_by_pointer_and_by_keys(page: Page, server: Server) -> None:
    explanation = server.ask(explain=True)["explanation"]
    visit(page, server)
    ask(page)
    tip, token = page.locator("#token-tip"), page.locator('#prompt [data-i][tabindex="0"]')
    page.locator("#prompt .s-recomputed [data-i]").first.hover()
    for text in ("recomputed", "local", explanation["parts"][2]["reason"]):
        expect(tip).to_contain_text(text)
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()
    assert token.count() == 1  # Tab stops there once
    token.focus()
    expect(tip).to_contain_text("token 1 of")
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("token 2 of")
    page.keyboard.press("ArrowDown")  # to the next run
    expect(page.locator("#prompt .s-exact [data-i]:focus")).to_have_count(0)
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "token-tip"
    page.keyboard.press("End")
    expect(tip).to_contain_text("computed")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_token_of_an_edited_passage_shows_its_donor(page: Page, server: Server) -> None:
    text, by = " ".join(p.text for p in PASSAGES), server.engine.blender
    edited = text.replace("nine", "ten")
    old, new = (server.engine.prompts.chunk(Passage(said)).ids for said in (text, edited))
    by.writer.precompute([old])

    def with_edit(route: Route) -> None:
        asked = json.loads(route.request.post_data or "")
        route.continue_(post_data=json.dumps({**asked, "passages": [OWN[0], {"text": edited}]}))

    page.route("**/v1/rag/query", with_edit)
    visit(page, server)
    ask(page)
    page.locator("#prompt .s-near_duplicate [data-i]").first.hover()
    for told in ("near", by.key(old).hex()):
        expect(page.locator("#token-tip")).to_contain_text(told)
    assert states_shown(page)["near_duplicate"] > len(new) // 2
    by.writer.delete([old, new])
    key = page.locator('.key[data-state="recomputed"]')  # pressed, the other states fade
    for pressed, opacity in (("true", "0.35"), ("false", "1")):
        key.click()
        expect(key).to_have_attribute("aria-pressed", pressed)
        expect(page.locator("#prompt .run.s-exact").first).to_have_css("opacity", opacity)
        expect(page.locator("#prompt .run.s-recomputed").first).to_have_css("opacity", "1")


def test_the_slider_is_the_ratio(page: Page, server: Server) -> None:
    visit(page, server)
    open_options(page)
    ask(page)
    for ratio in ("0.5", "0.04"):
        page.locator("#ratio").fill(ratio)
        want = states_of(server.ask(ratio=float(ratio), max_tokens=1)["report"])
        eventually(lambda want=want: page.locator("#ttft").count() and states_shown(page) == want)  # type: ignore[misc]
    page.select_option("#method", "full")
    expect(page.locator("#ratio")).to_be_disabled()


def test_a_passage_with_markup_is_text_everywhere(page: Page, server: Server) -> None:
    title = f"<b>Heron</b> {MARKUP}"[:200]
    body = {"collection": "a", "documents": [{"id": "<i>x</i>", "title": title, "text": MARKUP}]}
    assert server.job("/v1/documents", body)["state"] == "done"
    visit(page, server)
    ask(page, "Where is the heron?")
    assert "<script>window.harmed=1</script>" in (page.locator("#prompt").text_content() or "")
    page.locator("#prompt .part", has_text="onerror").locator("[data-i]").first.hover()
    for view in ("store", "documents"):
        page.click(f"#tab-{view}")
        expect(page.locator(f"#{view} tbody")).to_contain_text("<b>Heron</b>")
    assert page.evaluate("window.harmed") is None
    assert page.locator("main :is(img, script, i:not(.swatch))").count() == 0
    server.delete("/v1/documents/%3Ci%3Ex%3C%2Fi%3E", collection="a").raise_for_status()


def test_chunks_are_searched_pinned_deleted_and_cached(page: Page, server: Server) -> None:
    def state() -> tuple[bool, bool]:
        (chunk,) = server.get("/v1/cache/chunks?collection=a&search=HILLS").json()["data"]
        return chunk["stored"], chunk["pinned"]

    visit(page, server, "store")
    expect(rows(page, "store")).to_have_count(3)
    page.fill("#store-search", "fell on the HILLS")
    expect(rows(page, "store")).to_have_count(1)
    row = rows(page, "store").first
    expect(row).to_contain_text("pinned")
    for click, shows, want in (
        ("Unpin", "Pin", (True, False)),
        ("Pin", "Unpin", (True, True)),
        ("Delete KV", "not stored", (False, False)),
        ("Cache", "Unpin", (True, True)),
    ):
        row.get_by_text(click, exact=True).click()
        row.get_by_text(re.compile(f"^{shows}")).first.wait_for()
        assert state() == want
    page.fill("#store-search", "")
    page.select_option("#store-collection", "b")
    expect(rows(page, "store").first).to_contain_text("Dogs")
    expect(page.locator(".tile", has_text="Capacity used")).to_be_visible()


def test_documents_are_dropped_in_followed_listed_and_deleted(
    page: Page, server: Server, tmp_path: Path
) -> None:
    pytest.importorskip("python_multipart")
    visit(page, server, "documents")
    expect(rows(page, "documents")).to_have_count(3)
    notes, picture = tmp_path / "notes.md", tmp_path / "picture.png"
    notes.write_text("# Of otters\n\nThe otter sleeps on its back and holds a stone.")
    picture.write_bytes(b"\x89PNG")
    page.set_input_files("#files", notes)
    expect(page.locator(".job.done")).to_contain_text("1 of 1 document")
    expect(rows(page, "documents")).to_have_count(4)
    lines = "".join(json.dumps({"id": f"line {n}", "text": f"Badger {n} digs."}) + "\n" for n in range(3))
    page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.items.add(new File([text], "badgers.jsonl"));
            const dropped = {dataTransfer: data, cancelable: true, bubbles: true};
            document.getElementById("documents").dispatchEvent(new DragEvent("drop", dropped));
        }""",
        lines,
    )
    expect(page.locator(".job.done").first).to_contain_text("3 of 3 documents")
    expect(rows(page, "documents")).to_have_count(7)
    page.fill("#documents-search", "otters")
    expect(rows(page, "documents")).to_have_count(1)
    for name in ("Delete: Of otters", "Confirm delete: Of otters"):
        page.get_by_role("button", name=name).click()
    expect(rows(page, "documents").filter(has_text="otters")).to_have_count(0)
    assert "notes.md" not in server.backend.collections.indexes["a"]
    page.set_input_files("#files", picture)
    expect(page.locator(".job.failed")).to_contain_text("picture.png")
    for n in range(3):
        server.delete(f"/v1/documents/line {n}", collection="a").raise_for_status()


def test_the_page_works_while_the_model_is_busy(page: Page, server: Server) -> None:
    """A question shows its passages, other views open, and Stop ends it; then the same is answered."""
    with server.busy():
        visit(page, server)
        ask(page, wait=False)
        expect(page.locator("#prompt .part h3").first).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        ask(page, wait=False)
        for view in ("documents", "store"):
            page.click(f"#tab-{view}")
            expect(rows(page, view).first).to_be_visible()
        page.click("#tab-ask")
        assert page.locator("#ttft").count() == 0
    expect(page.locator("#ttft")).to_be_visible()
    eventually(lambda: server.is_idle)


def test_charts_show_the_servers_metrics(page: Page, server: Server) -> None:
    visit(page, server, "load")
    stored = server.engine.store.stats().bytes
    said = page.evaluate('async n => (await import("/page/format.js")).bytes(n)', stored)
    expect(page.locator(".chart", has_text="KV in the store")).to_contain_text(said)
    server.ask(QUESTIONS[1], max_tokens=8)
    expect(page.locator(".chart", has_text="Time to first token").locator("b").first).not_to_have_text("–")
    assert page.locator(".chart path.line").first.get_attribute("d")
    # By hand: 4 in (0, 1], 4 in (1, 3]; half are below the first bucket's end, 3/4 below the second's middle.
    look = 't_bucket{le="1"} %d\nt_bucket{le="3"} %d\nt_bucket{le="+Inf"} %d\n# HELP x "{\n'
    found = page.evaluate(
        """async ([before, after]) => {
            const {parse, quantile} = await import("/page/load.js");
            return [0.5, 0.75, 1].map(q => quantile(parse(before), parse(after), "t", q));
        }""",
        [look % (2, 2, 2), look % (6, 10, 10)],
    )
    assert found == [1, 2, 3]


def test_every_stage_has_a_look_of_its_own(page: Page, server: Server) -> None:
    visit(page, server)
    looks = page.evaluate(
        """async () => {
            const {stageView} = await import("/page/stages.js");
            const names = ["retrieve", "match", "queue", "load", "select", "correct", "prefill", "ttft"];
            const timings = Object.fromEntries(names.map(name => [name, 1]));
            document.body.append(stageView({...timings, prefill: 5, ttft: 10}));
            const style = swatch => { const {backgroundColor, backgroundImage} = getComputedStyle(swatch);
                                      return backgroundColor + backgroundImage };
            return [...document.querySelectorAll(".stages .swatch")].map(style);
        }"""
    )
    assert len(set(looks)) == len(looks) == 8
    assert "rgba(0, 0, 0, 0)none" not in looks


@pytest.mark.parametrize("stacked", [False, True], ids=["lines", "areas"])
def test_a_chart_of_few_points_shows_them(page: Page, server: Server, stacked: bool) -> None:
    visit(page, server)
    for values in ([3.0], [3.0, 4.0], [None, 3.0, None]):
        widths = page.evaluate(
            """async ([values, stacked]) => {
                const {makeChart} = await import("/page/load.js");
                const chart = makeChart("toy", ["a"], {shown: String, stacked});
                const points = values.map((value, n) => ({since: n, t: n + 1, values: [value]}));
                chart.update(points, 60);
                document.getElementById("ask").append(chart.element);
                return [...chart.element.querySelectorAll(".plot path")].map(path => path.getBBox().width);
            }""",
            [values, stacked],
        )
        assert min(widths) > 5, values


def test_a_key_in_the_url_is_kept_in_the_tab_and_not_in_the_url(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path, api_key="sk-of-the-url") as closed:
        page.goto(f"{closed.url}/#key=sk-of-the-url")
        expect(page.locator("#about")).to_contain_text("tiny")
        assert "sk-of" not in page.url
        page.reload()
        expect(page.locator("#about")).to_contain_text("tiny")


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path, keys=tmp_path / "keys.json") as closed:
        key = closed.tenant(read_only=True).key
        page.goto(closed.url)
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        for tried in ("bsk-wrong", key):
            expect(page.locator("#key-problem")).to_have_text("" if tried != key else re.compile("."))
            page.fill("#key", tried)
            page.get_by_role("button", name="Use this key").click()
        expect(page.locator("#about")).to_contain_text("tiny")
        expect(dialog).to_be_hidden()
        ask(page)
        page.reload()
        expect(page.locator("#about")).to_contain_text("tiny")
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert page.context.cookies() == []
        assert key not in page.content()
        page.click("#tab-documents")
        expect(page.locator("#documents .drop")).to_be_hidden()  # the key may only read
        page.click("#tab-load")
        expect(page.locator("#load .problem")).not_to_be_empty()  # metrics need an admin's key
        page.get_by_role("button", name="Forget the API key").click()
        expect(dialog).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#about")).not_to_contain_text("tiny")


def test_a_server_stops_and_starts_again(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        visit(page, first)
        ask(page)
    ask(page, QUESTIONS[1], wait=False)
    expect(page.locator("#ask .problem")).not_to_be_empty()
    expect(page.locator("#banner")).not_to_be_empty()
    with serving(tmp_path, port=int(first.url.rpartition(":")[2])):
        expect(page.locator("#banner")).to_contain_text("back")
        ask(page, QUESTIONS[1])
        expect(page.locator("#ask .problem")).to_be_empty()


def test_axe_finds_no_serious_fault(page: Page, server: Server) -> None:
    """In light or dark; and a narrow screen needs no scrolling sideways."""
    visit(page, server)
    ask(page)
    page.locator("#prompt .s-recomputed [data-i]").first.hover()
    for view in VIEWS:
        page.click(f"#tab-{view}")
        page.locator(f"#{view} :is(tbody tr, .chart, #ttft)").first.wait_for()
        page.emulate_media(color_scheme="light")
        assert not faults(page)
        page.emulate_media(color_scheme="dark")
        assert not faults(page, "color-contrast")  # the others do not depend on colours
    page.set_viewport_size({"width": 340, "height": 700})
    for view in VIEWS:
        page.click(f"#tab-{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 340, view
    page.click("#tab-ask")  # and the look for faults would see one
    page.evaluate("document.getElementById('about').style.color = '#303030'")
    assert [rule for rule, _ in faults(page, "color-contrast")] == ["color-contrast"]


def test_the_page_names_all_its_scripts_so_that_none_waits_for_another(page: Page, server: Server) -> None:
    visit(page, server)
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    named = page.eval_on_selector_all(
        "script[src], link[rel=modulepreload]", "all => all.map(element => element.src || element.href)"
    )
    assert sorted(named) == sorted(name for name in set(loaded) if name.endswith(".js"))


def test_tabs_and_theme_work_by_keys(page: Page, server: Server) -> None:
    visit(page, server)
    page.focus("#tab-ask")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-store")).to_be_focused()
    expect(page.locator("#store")).to_be_visible()
    expect(page.locator("#ask")).to_be_hidden()
    page.keyboard.press("End")
    expect(page.locator("#load")).to_be_visible()
    page.focus("#theme")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
