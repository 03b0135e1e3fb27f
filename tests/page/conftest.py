"""A real Chromium before toy servers. Where there is none, the tests are skipped, and the summary says so.

BLENDSERVE_CHROMIUM names one that is not on the path.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES
from tests.serve.helpers import Server

PATIENCE_MS = 60_000


def chromium() -> str | None:
    """Debian's, or another one: playwright's own download is not looked for."""
    names = (os.environ.get("BLENDSERVE_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, filter(None, names))), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One for all tests of a worker; playwright's event loop ends with it."""
    path = chromium()
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium, or set BLENDSERVE_CHROMIUM")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two collections of three documents each, whose KV is stored."""
    blend = {"method": "blend", "near": True}
    made = Server(tmp_path_factory.mktemp("page"), ServeConfig(slots=4), blend=blend)
    made.engine.precompute(PASSAGES)
    yield made
    made.close()


@pytest.fixture(scope="package")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """What tabs have in common: what the browser keeps. Tests that leave something there take one of their own."""
    yield from opened(browser)


@pytest.fixture
def own_context(browser: Browser) -> Iterator[BrowserContext]:
    yield from opened(browser)


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """An empty page. What goes wrong in it, a violation of its own policy among that, fails the test."""
    yield from watched(context)


@pytest.fixture
def own_page(own_context: BrowserContext) -> Iterator[Page]:
    """The same in a context of its own."""
    yield from watched(own_context)


def watched(context: BrowserContext) -> Iterator[Page]:
    made, wrong = context.new_page(), list[str]()

    def heard(message: ConsoleMessage) -> None:
        expected = "Failed to load resource" in message.text  # a refusal that the page is to show
        if message.type in ("error", "warning") and not expected:
            wrong.append(message.text)

    made.on("console", heard)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    yield made
    made.close()
    assert not wrong


def opened(browser: Browser) -> Iterator[BrowserContext]:
    """What one person's tabs have in common, until it is closed."""
    made = browser.new_context(viewport={"width": 1280, "height": 900})
    made.set_default_timeout(PATIENCE_MS)
    yield made
    made.close()
