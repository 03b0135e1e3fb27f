"""Write docs/pictures/page_ask.png and page_compare.png: the page on the demo's index, in a browser.

python scripts/make_screenshots.py

It needs the extras `dev` and `serve`, and a Chromium. Times in the pictures are of this machine.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

from blendserve.bench.server_process import ServerProcess, serve_command
from blendserve.demo import INDEX, QUESTIONS, open_demo

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SIZE: ViewportSize = {"width": 1280, "height": 860}
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
            for name, act in (("ask", ask), ("compare", compare)):
                page = browser.new_page(viewport=SIZE)
                page.set_default_timeout(PATIENCE_MS)
                page.goto(server.url)
                page.fill("#question", QUESTIONS[0])
                act(page)
                page.screenshot(path=PICTURES / f"page_{name}.png")
                page.close()
        browser.close()


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


def compare(page: Page) -> None:
    for _ in range(2):
        page.get_by_role("button", name="Compare methods").click()
        page.get_by_role("button", name="Replay side by side").wait_for()
    page.mouse.move(1, 1)


if __name__ == "__main__":
    main()
