"""Write docs/pictures/page_light.png, page_dark.png and page_race.png: the page on the demo's index, in a browser.

python scripts/make_screenshots.py

It needs the extras `dev` and `serve`, and a Chromium. Times in the pictures are of this machine.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from blendserve.bench.server_process import ServerProcess, serve_command
from blendserve.demo import INDEX, QUESTIONS, open_demo

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = {"width": 1280, "height": 860}
PATIENCE_MS = 60_000


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    open_demo().close()
    command = serve_command("--index", str(INDEX), "--method", "blend")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with ServerProcess(command, Path(folder) / "server.log") as server:
            for scheme in ("light", "dark"):
                page = visit(browser, server.url, scheme)
                ask(page)
                page.screenshot(path=PICTURES / f"page_{scheme}.png")
                page.close()
            page = visit(browser, server.url, "light")
            race(page)
            page.screenshot(path=PICTURES / "page_race.png")
        browser.close()


def visit(browser: Browser, url: str, scheme: str) -> Page:
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type,unused-ignore]
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.fill("#question", QUESTIONS[0])
    return page


def ask(page: Page) -> None:
    """Ask once to warm up and once more; then point at a recomputed token."""
    for _ in range(2):
        page.get_by_role("button", name="Ask", exact=True).click()
        page.wait_for_selector("#ttft")
    recomputed = ".s-recomputed [data-i]"
    second = page.locator("#prompt .part").filter(has=page.locator(recomputed)).nth(1)
    page.evaluate("document.querySelector('.parts').scrollTop = 0")
    second.evaluate("part => part.parentElement.scrollTo(0, part.offsetTop - part.parentElement.offsetTop)")
    page.wait_for_function("document.querySelector('.parts').scrollTop > 0")
    page.mouse.move(1, 1)
    second.locator(recomputed).first.hover()
    page.wait_for_selector("#token-tip:visible")


def race(page: Page) -> None:
    for _ in range(2):
        page.get_by_role("button", name="Compare methods").click()
        page.get_by_role("button", name="Replay side by side").wait_for()
    page.mouse.move(1, 1)


if __name__ == "__main__":
    main()
