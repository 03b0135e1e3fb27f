"""Mistakes on the command line: the one table of the suite that reads messages, for the name that each must hold."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.bench.conftest import write_shape
from tests.cli.conftest import write_corpus
from tests.support.commands import cli

ERRORS = [  # command line; the option, setting, file or word that the last line of stderr names
    ("index build {tmp}/broken.jsonl {tmp}/x", "{tmp}/broken.jsonl, line 2"),
    ("ask Why? -i {tmp}/nothing", "{tmp}/nothing"),
    ("ask Why? -i {index} -c {tmp}/fp16.yaml", "float16"),
    ("ask Why? -i {index} --method magic", "'blend.method' cannot be 'magic'"),
    ("precompute {index} --store /proc/nowhere", "/proc/nowhere"),
    ("precompute {index} -c {tmp}/small.yaml", "store.cap_gb"),
    ("precompute {index} --shard 2/2", "shard 2/2"),
    ("precompute {index} --ray auto", "--workers"),
    ("precompute {index} --workers 2 --shard 0/2", "--shard"),
    ("precompute {index} --codec int8@5", "int8@0"),
    ("serve -i {index} --ray auto", "--replicas"),
    ("serve -i {index} --host 0.0.0.0", "--api-key"),
    ("serve -i {index} --keys {tmp}/none.json", "{tmp}/none.json"),
    ("serve -i {index} --port {port}", "port {port}"),
    ("kdn verify {tmp}/none/x", "{tmp}/none/x"),
    ("codec fit {index} --codec int8", "'int8'"),
    ("codec fit {index} --codec predict --text {tmp}/nowhere", "{tmp}/nowhere"),
    ("kdn publish {index} {tmp}/.hidden", "'.hidden'"),
    ("kdn publish {index} https://host/x", "https://host/x"),
    ("ask Why? -i kdn:here", "'kdn:here'"),
    ("ask Why? -i https://host/x", "kdn:https://host/x"),
    ("cost --bench {tmp}/nowhere.json", "{tmp}/nowhere.json"),
    ("simulate --requests 0", "'simulate.requests.number'"),
    ("evaluate --runs {tmp}/runs --methods qeury@0.1", "'qeury@0.1'"),
    ("evaluate --runs {tmp}/runs --ratios a", "'evaluate.ratios"),
    ("evaluate --runs {tmp}/runs --dataset no/such.json", "'no/such.json'"),
    ("bench ttft --model random:gpt-9", "Qwen2.5-0.5B"),
    ("bench ttft --model {bad}", "{tmp}/bad"),
    ("bench ttft --model {tiny} --contexts 25600", "the longest prompt"),
    ("bench ttft --ratio 0.1,1.7", "ratios.1' cannot be"),
    ("bench ttft --model {tiny} --contexts 120 --chunk-tokens 40 --methods deviation[9]@0.1", "layers"),
    ("bench decode --model {tiny} --contexts 2040", "context"),
    ("bench ttft --model {tiny} --contexts 1000", "1,000"),
    ("bench suite {tmp}/nowhere.yaml --out {tmp}/results", "nowhere.yaml"),
    ("bench codec --codecs int9", "'int8'"),
    # where results go is checked before the work: these would take minutes
    ("index build {corpus} {tmp}/fp16.yaml/x", "{tmp}/fp16.yaml"),
    ("index add {corpus} {tmp}/fp16.yaml", "{tmp}/fp16.yaml"),
    ("demo -i {tmp}/fp16.yaml", "{tmp}/fp16.yaml"),
    ("demo --page --port {port} -i {tmp}/demo", "port {port}"),
    ("kdn publish {index} {tmp}/fp16.yaml/x", "{tmp}/fp16.yaml"),
    ("kdn serve {tmp}/nothing", "{tmp}/nothing"),
    ("keys create me --file {tmp}/none/keys.json", "{tmp}/none"),
    ("keys create me --file {tmp}", "{tmp}"),
    ("simulate --requests 1000000000 --plot {tmp}/none/plot.svg", "{tmp}/none"),
    ("simulate --measure {tmp}", "{tmp}"),
    ("bench ttft --plot {tmp}/none/plot.svg", "{tmp}/none"),
    ("bench ttft --out {tmp}", "{tmp}"),
    ("evaluate --runs {tmp}/fp16.yaml", "{tmp}/fp16.yaml"),
    ("serve --set serve.slotz=1", "serve.slots"),
    ("serve --set xxxxxxxxxx=1", "nearest"),
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def values(index: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What stands in braces in the table."""
    tmp = tmp_path_factory.mktemp("mistakes")
    files = {
        "broken.jsonl": '{"text": "fine"}\n{"text": \n',
        "fp16.yaml": "model: {dtype: float16}",
        "small.yaml": f"store: {{cap_gb: 0.000001, location: {tmp / 'small'}}}",
    }
    for name, text in files.items():
        (tmp / name).write_text(text)
    corpus = write_corpus(tmp / "corpus.jsonl", 1)
    shapes = {
        "corpus": corpus,
        "tiny": write_shape(tmp / "tiny"),
        "bad": write_shape(tmp / "bad", num_key_value_heads=3),
    }
    return {"tmp": tmp, "index": index, "port": port, **shapes}


@pytest.mark.parametrize(("line", "name"), ERRORS, ids=[line for line, _ in ERRORS])
def test_a_mistake_is_one_line_that_names_it(line: str, name: str, values: dict[str, object]) -> None:
    done = cli(*(word.format(**values) for word in shlex.split(line)))
    last = done.err.strip().splitlines()[-1]
    assert (done.code, last.startswith("error: ")) == (2, True)
    assert name.format(**values) in last
    assert "Traceback" not in done.err
    assert not Path(f"{values['tmp']}/runs").exists()


COST = "cost -c configs/cost/h100_8b.yaml --prices configs/cost/prices.yaml"
COMMANDS = (
    "--version",
    "index build {corpus} {made}/index",
    "ask Why? -i {index} --max-new-tokens 1",
    "keys list --file {made}/none.json",
    COST,
)
HOMES = {  # HOME, XDG_CACHE_HOME, and whether there is a folder for temporary files
    "home is a file": ("/dev/null", "", True),
    "home is missing, with its parent": ("/proc/none/home", "", True),
    "no home": ("", "", True),
    "cache is a file": ("", "/dev/null", True),
    "nothing can be written": ("/dev/null/none", "", False),
}


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("home", HOMES)
def test_without_a_home_a_command_works_or_says_why(
    home: str, line: str, values: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, cache, has_temporary = HOMES[home]
    for name, value in (("HOME", user), ("XDG_CACHE_HOME", cache)):
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))  # a user whom the system does not know
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path) if has_temporary else "/dev/null")
    done = cli(*(word.format(**values, made=tmp_path) for word in shlex.split(line)))
    assert done.code == 0 or (not has_temporary and done.err.strip().splitlines()[-1].startswith("error: "))


READ = "import sys; from blendserve.cli import main; sys.exit(main())"
LINES = ("--help", COST, f"{COST} --json")  # commands that start at once


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("output", ["closed", "full", "without a reader", "ascii"])
def test_output_that_cannot_be_written_is_no_traceback(output: str, line: str) -> None:
    command = [sys.executable, "-c", READ, *shlex.split(line)]
    if output == "without a reader":
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")
    elif output == "full":
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1
    else:
        words = ["sh", "-c", 'exec "$@"' + " >&-" * (output == "closed"), "sh", *command]
        ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        done = subprocess.run(words, capture_output=True, text=True, env=ascii_only)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)


INTERRUPTED = """
import os, signal, sys
import blendserve.cli

class Interrupt:
    "Sends Ctrl-C at the n-th module that is looked for."
    left = int(sys.argv.pop(1))
    def find_spec(self, *_):
        Interrupt.left -= 1
        if not Interrupt.left:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores Ctrl-C
sys.meta_path.insert(0, Interrupt())
sys.exit(blendserve.cli.main())
"""


@pytest.mark.parametrize(
    "at", [1, 3, 20, *(pytest.param(n, marks=pytest.mark.nightly) for n in (90, 250, 500, 900)), 1400]
)
def test_ctrl_c_at_any_moment_is_one_line(at: int, values: dict[str, object], tmp_path: Path) -> None:
    """The command imports nearly everything."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", 1)
    words = ["-c", INTERRUPTED, str(at), "index", "build", str(corpus), str(tmp_path / "index")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "stopped"
    assert "Traceback" not in done.stderr
