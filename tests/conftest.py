"""No test goes online. Every push runs the same few examples; a night runs many random ones.

pytest                                        what `make test` runs: not `nightly`, not `gpu`
pytest --night                                everything that runs on a CPU, over all model families
pytest -m gpu                                 the kernels on this machine's GPU
pytest --hypothesis-profile=nightly TEST      200 new examples of one property
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("BLENDSERVE_AUTOTUNE", "0")  # the table's first backend computes, on any machine
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read when haystack is first imported
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which a folder's conftest may do
os.environ.pop("SSL_CERT_FILE", None)
# a folder without certificates: each client would read all those of the system
os.environ["SSL_CERT_DIR"] = os.fspath(Path(__file__).parent)
INTEGRATIONS = Path(__file__).parents[1] / "integrations"
for folder in ("langchain", "llama_index", "haystack/src", "moq", "vllm"):  # imported from this checkout
    sys.path.append(str(INTEGRATIONS / folder))

gc.disable()  # while tests are collected: what they import stays, and to look at it took a tenth of that time
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("push", COMMON, derandomize=True, max_examples=25)
settings.register_profile("nightly", COMMON, derandomize=False, max_examples=200)
# What fails is not shrunk: scripts/mutations.py asks only whether a test fails, and shrinking takes minutes.
settings.register_profile("mutations", settings.get_profile("push"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("push")

# Tests that take long, each group on one worker: at the end there are short ones alone, which two workers can share.
LONG_FIRST = (("tests/ray/",), ("tests/page/", "tests/test_"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--night", action="store_true", help="run tests marked nightly, and every model family")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        os.environ["TRITON_INTERPRET"] = "0"
    if config.option.night:
        from tests.support import models  # not before the variables above are set

        models.KINDS[:] = models.BLEND_KINDS[:] = models.TINY
        settings.load_profile("nightly")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a push does not run, and put long tests at the head of each worker's half."""
    left_out = {"gpu"} if config.option.night else {"gpu", "nightly"}
    if not config.option.markexpr:
        dropped = {item for item in items if left_out & {mark.name for mark in item.iter_markers()}}
        config.hook.pytest_deselected(items=[*dropped])
        items[:] = [item for item in items if item not in dropped]
    first, second = ([item for item in items if item.nodeid.startswith(paths)] for paths in LONG_FIRST)
    long = {*first, *second}
    rest = [item for item in items if item not in long]
    half = max(0, len(items) // 2 - len(first))  # xdist gives each of two workers half of the list
    items[:] = [*first, *rest[:half], *second, *rest[half:]]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name each skipped test with its number of cases; the list of reasons names none."""
    skipped = Counter(report.nodeid.partition("[")[0] for report in terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.section(f"{skipped.total()} skipped", sep="-")
        for name, count in sorted(skipped.items()):
            terminalreporter.line(f"{count:4} {name}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command freezes its objects, as its process ends (cli/core.py); here a thousand tests follow."""
    monkeypatch.setattr("gc.freeze", lambda: None)


@pytest.fixture(autouse=True)
def tiny_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of tests are tiny: chunks below the least size of blending are blended, at the ratio itself."""
    if not request.node.get_closest_marker("floors"):
        monkeypatch.setattr("blendserve.blend.layout.LEAST_REUSED", 0)
        monkeypatch.setattr("blendserve.blend.selection.LEAST_RECOMPUTED", 0)


@pytest.fixture
def toy_codec() -> Iterator[None]:
    """A codec of the tests' own: one file, one line."""
    from blendserve.registry import CODECS
    from blendserve.store.codecs.base import forget_ready

    forget_ready()
    CODECS.add("toy", "tests.support.codecs:Toy")
    yield
    CODECS.remove("toy")
