"""A real Chromium in front of a toy server. Without one, the tests are skipped, and the summary says so.

BLENDSERVE_CHROMIUM names one that is not on the path.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.support.engines import PASSAGES
from tests.support.http import Server, serving

TIMEOUT_MS = 30_000


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One for all tests of a process; playwright's event loop ends with it."""
    names = (os.environ.get("BLENDSERVE_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium, or set BLENDSERVE_CHROMIUM")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without keys: two collections of three documents each, whose KV is stored."""
    with serving(tmp_path_factory.mktemp("page"), slots=4, engine={"blend": {"near": True}}) as made:
        made.engine.precompute(PASSAGES)
        yield made


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page with its own storage. An error in it, also of its own policy, fails the test."""
    context, wrong = browser.new_context(viewport={"width": 1280, "height": 900}), list[str]()
    context.set_default_timeout(TIMEOUT_MS)
    made = context.new_page()

    def heard(message: ConsoleMessage) -> None:
        expected = "Failed to load resource" in message.text  # a refusal that the page is to show
        if message.type in ("error", "warning") and not expected:
            wrong.append(message.text)

    made.on("console", heard)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    yield made
    context.close()
    assert not wrong
