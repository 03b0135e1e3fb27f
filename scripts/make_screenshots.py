"""Write docs/pictures/race.webp and page.webp: the page on the demo's index, in a browser.

python scripts/make_screenshots.py

It needs the extra `dev`, Pillow and a Chromium. Times in the pictures are of this machine. The moving picture is the
replay of a race at its real speed, without most of the time in which the answer of full prefill is generated: the clock
of the page is stopped, and a picture is taken every FRAME_MS of it.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from blendserve.bench.server_process import ServerProcess, serve_command
from blendserve.demo import INDEX, open_demo

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDE: ViewportSize = {"width": 1280, "height": 860}
FRAMED: ViewportSize = {"width": 1000, "height": 620}
FRAME_MS = 100
START_MS, END_MS = 1800, 4500  # that the first and the last picture are shown
ANSWER_MS = 1500  # of full prefill's answer that is shown
PATIENCE_MS = 60_000
QUALITY = 82


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    open_demo().close()
    command = serve_command("--index", str(INDEX), "--method", "blend")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with ServerProcess(command, Path(folder) / "server.log") as server:
            race(opened(browser, server.url, FRAMED)).close()  # warms up
            moving_picture(opened(browser, server.url, FRAMED))
            shown = race(opened(browser, server.url, WIDE))
            picture(shown).save(PICTURES / "page.webp", quality=QUALITY, method=6)
        browser.close()


def opened(browser: Browser, url: str, size: ViewportSize) -> Page:
    page = browser.new_page(viewport=size, color_scheme="light")
    page.set_default_timeout(PATIENCE_MS)
    page.clock.install()
    page.goto(url)
    page.locator("#landing button").first.hover()
    return page


def race(page: Page) -> Page:
    """Click the first question, and wait for both answers."""
    page.locator("#landing button").first.click()
    page.wait_for_selector("#follow:visible")
    page.mouse.move(1, 1)
    return page


def moving_picture(page: Page) -> None:
    """The question, and the race from its start to its end."""
    frames = [(picture(page), START_MS)]
    race(page)
    frames += [(frame, FRAME_MS) for frame in replay(page)]
    frames.append((picture(page), END_MS))
    images, durations = zip(*frames, strict=True)
    path = PICTURES / "race.webp"
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=list(durations),
        loop=0,
        lossless=True,  # smaller than lossy: few colours, and little changes from picture to picture
        minimize_size=True,
        method=4,
    )
    print(
        f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, {len(images)} pictures, {sum(durations) / 1e3:.1f} s"
    )


def replay(page: Page) -> Iterator[Image.Image]:
    """Pictures of the replay, from its start until ANSWER_MS after full prefill's first token."""
    result, answer = page.locator("#race-result"), page.locator(".lane[data-method=full] .said")
    text = result.text_content()
    page.clock.pause_at(page.evaluate("Date.now()") / 1e3 + 1)
    page.get_by_role("button", name="Replay").click()
    page.mouse.move(1, 1)
    left_ms = ANSWER_MS
    while result.text_content() != text:
        page.clock.run_for(FRAME_MS)
        if answer.text_content():
            left_ms -= FRAME_MS
        if left_ms >= 0:
            yield picture(page)


def picture(page: Page) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")


if __name__ == "__main__":
    main()
