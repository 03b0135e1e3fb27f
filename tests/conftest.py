"""Nothing here goes online; a run's examples are the same every time.

`pytest --hypothesis-profile=search` looks for new ones, `nightly` does so for the whole suite.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault(
    "BLENDSERVE_RACE", "0"
)  # who computes is the table's first, however fast the machine is today
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels on the CPU: read when triton is first imported

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read when haystack is first imported
INTEGRATIONS = Path(__file__).parents[1] / "integrations"
for folder in ("langchain", "llama_index", "haystack/src"):  # imported from this checkout
    sys.path.append(str(INTEGRATIONS / folder))

settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("suite"), derandomize=False, max_examples=1000)
settings.register_profile("nightly", settings.get_profile("suite"), derandomize=False, max_examples=1000)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def ends_no_process() -> Iterator[None]:
    """A command's objects are never looked at again, as it ends (cli/collecting.py); here a thousand tests follow."""
    yield
    gc.unfreeze()


@pytest.fixture
def toy_codec() -> Iterator[None]:
    """A codec of the tests' own: one file, one line."""
    from blendserve.registry import CODECS
    from blendserve.store.codecs.base import forget_ready

    forget_ready()
    CODECS.add("toy", "tests.store.toy_codec:Toy")
    yield
    CODECS.remove("toy")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which instruction sets' kernels were tested, which this machine lacks, and whether it lacks a browser."""
    from blendserve.kernels.cpu.isa import LEVELS  # not before the variables above are set

    found = {
        outcome: Counter(
            match[1]
            for report in terminalreporter.stats.get(outcome, [])
            if (match := re.search(r"tests/kernels/.*\[(\w+)", report.nodeid)) and match[1] in LEVELS
        )
        for outcome in ("passed", "skipped")
    }
    if found["passed"] or found["skipped"]:
        tested = ", ".join(f"{name} ({n} tests)" for name, n in found["passed"].items()) or "none"
        lacking = ", ".join(found["skipped"].keys() - found["passed"].keys())
        terminalreporter.write_line(
            f"kernels of instruction sets tested: {tested}" + (f"; not here: {lacking}" if lacking else "")
        )
    if any(
        report.nodeid.startswith("tests/page/test_page.py")
        for report in terminalreporter.stats.get("skipped", [])
    ):
        terminalreporter.write_line(
            "the page was not tested in a browser: install Chromium, or set BLENDSERVE_CHROMIUM"
        )
