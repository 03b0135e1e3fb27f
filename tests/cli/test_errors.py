"""Mistakes on the command line: the one table of the suite that reads messages, for the name that each must hold."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.conftest import write_shape
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
    ("kdn list", "--store"),
    ("codec fit {index} --codec int8", "'int8'"),
    ("codec fit {index} --codec predict --text {tmp}/nowhere", "{tmp}/nowhere"),
    ("kdn pull here {tmp}/x", "'here'"),
    ("cost --bench {tmp}/nowhere.json", "{tmp}/nowhere.json"),
    ("simulate --requests 0", "'simulate.requests.number'"),
    ("evaluate --runs {tmp}/runs --methods qeury@0.1", "'qeury@0.1'"),
    ("evaluate --runs {tmp}/runs --ratios a", "'evaluate.ratios"),
    ("evaluate --runs {tmp}/runs --dataset no/such.json", "'no/such.json'"),
    ("bench ttft --model random:gpt-9", "Qwen2.5-0.5B"),
    ("bench ttft --model {bad}", "{tmp}/bad"),
    ("bench ttft --model {tiny} --contexts 25600", "the longest prompt"),
    ("bench ttft --ratio 0.1,1.7", "ratios.1' cannot be"),
    ("bench ttft --model {tiny} --contexts 120 --chunk-tokens 40 --methods deviation[9]@0.1", "check_layers"),
    ("bench decode --model {tiny} --contexts 2040", "context"),
    ("bench ttft --model {tiny} --contexts 1000", "1,000"),
    ("bench suite {tmp}/nowhere.yaml --out {tmp}/results", "nowhere.yaml"),
    ("bench codec --codecs int9", "'int8'"),
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
    shapes = {"tiny": write_shape(tmp / "tiny"), "bad": write_shape(tmp / "bad", num_key_value_heads=3)}
    return {"tmp": tmp, "index": index, "port": port, **shapes}


@pytest.mark.parametrize(("line", "name"), ERRORS, ids=[line for line, _ in ERRORS])
def test_a_mistake_is_one_line_that_names_it(line: str, name: str, values: dict[str, object]) -> None:
    done = cli(*(word.format(**values) for word in shlex.split(line)))
    last = done.err.strip().splitlines()[-1]
    assert (done.code, last.startswith("error: ")) == (2, True)
    assert name.format(**values) in last
    assert "Traceback" not in done.err
    assert not Path(f"{values['tmp']}/runs").exists()
