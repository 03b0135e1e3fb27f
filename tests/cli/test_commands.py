"""Commands from their arguments to their exit code and JSON; their help, and the options made of settings."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import lmdb
import pytest
import typer
import yaml
from rich.filesize import decimal
from rich.progress import Progress

import blendserve
from blendserve import console
from blendserve.cli.app import COMMANDS, app, run
from blendserve.cli.options import Options, make_app, with_options
from blendserve.config import BlendConfig, Config, DecodeConfig
from blendserve.paths import index_folder
from blendserve.registry import CODECS
from blendserve.store import LMDBStore
from blendserve.store.codecs.base import known_codec
from scripts.make_reference import MARKER, pages
from tests.cli.conftest import write_corpus
from tests.support.commands import cli, walk

SCRIPTS = Path(__file__).parents[2] / "scripts"
STORED = 6  # chunks when a run is stopped: of 24 that are computed in batches of 8, so some are missing


def test_ask_blends_with_the_given_ratio_and_streams(index: Path) -> None:
    question = ("ask", "Where was the bee seen?", "-i", index, "--max-new-tokens", 8)
    asked = cli(*question, "--json", "--method", "blend", "--ratio", 0.2)
    answer, report = asked.json(), asked.json()["report"]
    assert (asked.code, asked.out.count("\n")) == (0, 1)
    assert answer["passages"][-1]["doc_id"] == "doc-1"
    assert report["blended"] is True
    assert report["chunks_hit"] == report["chunks"] == 4
    assert report["share_recomputed"] == pytest.approx(0.2, abs=0.005)
    assert answer["timings"]["ttft"] > 0
    streamed = cli(*question)
    assert (streamed.code, "bee 1" in streamed.out) == (0, True)  # the title of a source


def test_calibrate_measures_every_ratio_and_a_target_is_served(index: Path, tmp_path: Path) -> None:
    few = ("calibrate", index, "--max-new-tokens", 4, "--json", "--prompts")
    found = cli(*few, 2).json()
    assert (found["prompts"], found["ratio"]) == (2, 0.15)
    assert [row["ratio"] for row in found["ratios"]] == [0, 0.05, 0.15, 0.3, 0.5]
    assert all(row["low"] <= row["agreement"] <= row["high"] for row in found["ratios"])
    asked = tmp_path / "asked.txt"
    asked.write_text("Where was the bee seen?\n\nWho came?\n")
    given = cli(*few, 5, "--questions", asked, "--min-agreement", 0.5).json()
    assert given["prompts"] == 4
    assert cli(*few, 5, "--questions", tmp_path / "none.txt").code == 2
    answer = cli("ask", "Who came?", "-i", index, "--json", "--set", "quality.min_agreement=0.5").json()
    report = answer["report"]["quality"]
    assert (report["prompts"], report["min_agreement"]) == (4, 0.5)
    assert cli("ask", "Who came?", "-i", index, "--json", "--ratio", 0.15).json()["report"]["quality"] is None


def test_index_and_store_commands_add_up(index: Path, tmp_path: Path) -> None:
    def chunks() -> int:
        return int(cli("store", "stats", index, "--json").json()["chunks"])

    again = cli("precompute", index, "--json")
    assert again.code == 0
    assert again.json() | {"computed": 0, "missing": 0, "tokens": 0} == again.json()
    more, before = write_corpus(tmp_path / "more.jsonl", 6), chunks()
    for expected in (2, 0):
        added = cli("index", "add", more, index, "--json")
        assert (added.code, added.json()["added"]) == (0, expected)
    assert cli("precompute", index).code == 0
    assert chunks() == before + 2
    assert cli("index", "delete", index, "doc-4", "doc-5", "--json").json()["deleted"] == 2
    assert chunks() == before
    assert cli("index", "delete", index, "doc-4").code == 1


def test_files_that_were_not_read_are_listed_and_strict_stops_at_the_first(tmp_path: Path) -> None:
    folder, index = tmp_path / "corpus", tmp_path / "index"
    states = {
        "read.txt": "read",
        "latin1.md": "read",
        "cut.txt": "failed",
        "blank.txt": "empty",
        "a.exe": "skipped",
    }
    folder.mkdir()
    (folder / "read.txt").write_text("A bee was seen.")
    (folder / "latin1.md").write_bytes("Die Bienen fliegen täglich.".encode("latin-1"))
    (folder / "cut.txt").write_bytes("漢".encode()[:2])
    (folder / "blank.txt").write_text(" ")
    (folder / "a.exe").write_bytes(b"MZ")
    done = cli("index", "build", folder, index)
    assert (done.code, "Traceback" in done.err) == (0, False)
    for name in states:
        assert sum(name in line for line in done.out.splitlines()) == (name != "read.txt"), name
    facts = cli("index", "build", folder, index, "--json").json()
    assert {file["name"]: file["state"] for file in facts["files"]} == states
    (folder / "more.txt").write_text("Another bee came.")
    assert cli("index", "add", folder, index, "--json").json()["added"] == 1
    for command in ("build", "add"):
        assert cli("index", command, folder, index, "--strict").code == 2


def test_precompute_says_what_it_needs_before_it_starts(tmp_path: Path) -> None:
    index = tmp_path / "index"
    assert cli("index", "build", write_corpus(tmp_path / "corpus.jsonl", 3), index).code == 0
    first, second = (cli("precompute", index, "--json").json() for _ in range(2))
    expected = first["expected_bytes"]
    assert expected == cli("store", "stats", index, "--json").json()["raw_bytes"]
    assert first["expected_seconds"] > 0
    assert (second["expected_bytes"], second["expected_seconds"]) == (0, 0)
    full = cli("precompute", index, "--store", tmp_path / "small", "--set", "store.cap_gb=0.000001")
    assert (full.code, decimal(expected) in full.err) == (2, True)


def test_shards_merge_into_one_store(index: Path, tmp_path: Path) -> None:
    for shard in ("0/2", "1/2"):
        store = tmp_path / f"kv-{shard[0]}"
        assert cli("precompute", index, "--shard", shard, "--store", store).code == 0
    merged = tmp_path / "all.yaml"
    merged.write_text(f"store: {{location: {tmp_path / 'kv'}}}\n")
    done = cli("store", "merge", index, tmp_path / "kv-0", tmp_path / "kv-1", "-c", merged, "--json")
    assert (done.code, done.json()["copied"]) == (0, 4)
    assert cli("precompute", index, "-c", merged, "--json").json()["computed"] == 0


def test_quiet_prints_results_alone(index: Path) -> None:
    for level, logs in (("--verbose", True), ("--quiet", False)):
        done = cli(level, "precompute", index)
        assert (done.code, done.out.count("\n"), bool(done.err.strip())) == (0, 1, logs)


def test_doctor_reports_every_check() -> None:
    done = cli("doctor", "--json")
    report = done.json()
    assert (done.code, report["passed"], len(report["rows"]) > 5) == (0, True, True)
    assert report["kernels"]["measured"] == []  # the suite turns measuring off
    assert all(report[name] for name in ("kv_bytes_per_token", "context_tokens", "exact", "approximate"))


@pytest.mark.skipif(known_codec("cachegen") is None, reason="constriction is not installed")
def test_tables_are_fitted_used_and_shown(tmp_path: Path) -> None:
    corpus, index = write_corpus(tmp_path / "corpus.jsonl", 3), tmp_path / "index"
    assert cli("index", "build", corpus, index).code == 0
    done = cli("codec", "fit", index, "--codec", "cachegen", "--text", corpus, "--tokens", 200, "--json")
    (fitted,) = done.json()["tables"]
    assert (done.code, fitted["codec"]) == (0, "cachegen")
    (shown,) = cli("codec", "show", index, "--json").json()["tables"]
    assert (shown["hash"], shown["bytes"], shown["current"]) == (fitted["hash"], fitted["bytes"], True)
    assert cli("precompute", index, "--codec", "cachegen@2", "--json").code == 0
    stats = cli("store", "stats", index, "--json").json()
    assert (stats["chunks"], stats["tables_bytes"]) == (3, fitted["bytes"])
    assert cli("store", "verify", index, "--json").json()["bad_tables"] == []


def test_results_are_tables_without_json(index: Path) -> None:
    assert [c["codec"] for c in cli("codec", "list", "--json").json()["codecs"]] == list(CODECS.names)
    for command in (("codec", "list"), ("codec", "show", index), ("store", "stats", index), ("doctor",)):
        done = cli(*command)
        assert (done.code, done.out.count("\n") > 3) == (0, True), command


def test_ctrl_c_ends_precompute_cleanly_and_the_next_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk is computed twice. tests/endurance/crash.py kills by SIGKILL, and verifies what is stored."""
    corpus, index, store = write_corpus(tmp_path / "corpus.jsonl", 24), tmp_path / "index", tmp_path / "kv"
    assert cli("index", "build", corpus, index).code == 0
    put, puts = LMDBStore.put, count(1)

    def interrupted(*args: Any, **options: Any) -> bool:
        stored = put(*args, **options)
        if next(puts) == STORED:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return stored

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    with monkeypatch.context() as patch:
        patch.setattr(LMDBStore, "put", interrupted)
        patch.setattr("sys.argv", ["precompute_kv.py", str(index), "--store", str(store)])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(SCRIPTS / "precompute_kv.py"), run_name="__main__")
    signal.signal(signal.SIGINT, before)
    assert stopped.value.code == 130
    report = cli("precompute", index, "--store", store, "--json").json()
    assert report["computed"] + report["skipped"] == report["chunks"] == 24
    assert STORED <= report["skipped"] < 24  # the chunks of the stopped batch are stored before the exit


def test_ctrl_c_while_a_bar_starts_leaves_the_terminal_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt itself comes out, the cursor is shown again, and the next bar starts."""
    asked: list[bool] = []

    def show_cursor(show: bool = True) -> None:
        asked.append(show)
        if asked == [False]:
            raise KeyboardInterrupt

    monkeypatch.setattr(console.err, "show_cursor", show_cursor)
    with pytest.raises(KeyboardInterrupt), console.progress("Waiting", "tokens") as update:
        update(1, 2)
    assert asked[-1] is True
    with console.progress("Waiting", "tokens") as update:
        update(2, 2)


def test_the_rate_of_a_bar_counts_what_was_done_since_it_appeared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored before, or while the model was loaded, took none of its time."""
    now, shown, update_bar = [0.0], list[str](), Progress.update

    def watched(bar: Any, task: Any, **fields: Any) -> None:
        shown.append(fields["rate"])
        update_bar(bar, task, **fields)

    monkeypatch.setattr(console.err, "get_time", lambda: now[0])
    monkeypatch.setattr(Progress, "update", watched)
    with console.progress("Precomputing", "tokens", refreshes=False) as update:
        update(4000, 9000)
        now[0] = 2.0
        update(4200, 9000)
    assert shown == ["tokens", "tokens, 100/s"]


def test_an_index_with_a_separator_in_its_name_is_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, folder in (("./i", "i"), ("i/", "i"), ("x/i", "x/i"), ("i", "indexes/i"), ("..", "..")):
        assert index_folder(name) == Path(folder)
        assert index_folder(index_folder(name)) == Path(folder)
    Path("i").mkdir()
    assert index_folder("i") == Path("i")
    corpus = write_corpus(tmp_path / "corpus.jsonl", 1)
    assert cli("index", "build", corpus, "./made").code == 0
    assert Path("made").is_dir()
    assert not Path("indexes").exists()


def test_an_index_on_a_read_only_disk_is_asked_and_not_changed(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere: LMDB refuses in place of the disk."""
    folder, opened = Path(shutil.copytree(index, tmp_path / "index")), lmdb.open

    def read_only_disk(path: str, **options: Any) -> Any:
        if not options.get("readonly"):
            raise OSError(errno.EROFS, "Read-only file system", path)
        return opened(path, **options)

    monkeypatch.setattr(lmdb, "open", read_only_disk)
    report = cli("ask", "Where was the bee seen?", "-i", folder, "--max-new-tokens", 2, "--json")
    assert (report.code, report.json()["report"]["chunks_hit"]) == (0, 4)
    for command in (("store", "verify", folder, "--repair"), ("index", "delete", folder, "doc-1")):
        done = cli(*command)
        assert (done.code, done.err.strip().splitlines()[-1].startswith("error: ")) == (2, True)


REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
FRESH = """
import json, sys
from blendserve.cli import main
codes = main(["--help"]), main(["--version"])
heavy = {"torch", "transformers", "numpy", "faiss", "lmdb", "fastapi"} & set(sys.modules)
print(json.dumps({"codes": codes, "heavy": sorted(heavy)}))
"""


@pytest.mark.parametrize(("name", "text"), pages().items(), ids=pages())
def test_generated_pages_are_current(name: str, text: str) -> None:
    written = (REFERENCE / name).read_text().partition(f"{MARKER}\n\n")[2]
    assert written == text, "run scripts/make_reference.py"


def test_every_command_and_option_has_help() -> None:
    found = dict(walk(typer.main.get_command(app)))
    assert {words[0] for words in found if words} == set(COMMANDS.names)
    for words, command in found.items():
        assert command.help, words
        assert [p.name for p in command.params if not p.help] == [], words
    basic, whole = cli("ask", "--help"), cli("ask", "--help-all")
    assert [done.code for done in (basic, whole)] == [0, 0]
    assert ["--top-p" in done.out for done in (basic, whole)] == [False, True]


def test_help_and_version_import_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    *_, line, told = done.stdout.splitlines()
    assert json.loads(told) == {"codes": [0, 0], "heavy": []}
    assert {blendserve.__version__, version("torch"), platform.python_version()} <= set(
        re.split("[ ,]", line)
    )


def test_installed_completion_completes_commands_in_a_new_shell(tmp_path: Path) -> None:
    program = tmp_path / "blendserve"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom blendserve.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    home = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    complete = "COMP_WORDS=(blendserve store ver) COMP_CWORD=2; _blendserve_completion blendserve; echo ${COMPREPLY[@]}"
    steps = ("blendserve --install-completion; true", f". ~/.bashrc; {complete}")
    _, done = [
        subprocess.run(["bash", "-c", step], env=home, capture_output=True, text=True) for step in steps
    ]
    assert done.stdout.split() == ["verify"], done.stderr


def called(options: Options, *words: str) -> Any:
    """The settings that a command with these options gets."""
    got: list[Any] = []
    toy = make_app()

    @toy.command()
    @with_options(settings=options)
    def command(what: Annotated[str, typer.Argument()], settings: Any) -> None:
        got.append(settings)

    assert run(toy, ["this", *words]) == 0
    return got[0]


def test_options_set_the_fields_they_are_named_after_over_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("store: {memory_bytes: 5, codec: int8}\nblend: {near: true}")
    base = Config(blend=BlendConfig(ratio=0.3))
    assert called(Options(base, "blend.ratio", "decode.stop")) == base
    fields = ("blend.ratio", "serve.hosts", "store.location", "store.memory_bytes", "blend.near")
    options = Options(Config(), *fields, load=Config.load)
    words = f"-c {file} --ratio auto --hosts a,b --hosts c --store here --memory-bytes 8 --no-near"
    got = called(options, *words.split())
    assert (got.blend.ratio, got.serve.hosts) == ("auto", ("a", "b", "c"))
    assert (got.store.path, got.store.memory_bytes, got.blend.near) == (Path("here"), 8, False)
    assert (got.store.codec, got.decode) == ("int8", DecodeConfig())
    options = Options(Config(), "decode.seed", "decode.stop")
    got = called(options, "--seed", "3", "--stop", "a, b", "--stop", "c")
    assert (got.decode.seed, got.decode.stop) == (3, ("a, b", "c"))


def config_file(folder: Path, text: str) -> tuple[object, ...]:
    """Return the option for a configuration file with this text."""
    file = folder / "config.yaml"
    file.write_text(text)
    return "-c", file


@pytest.mark.parametrize(
    ("setting", "flag", "values"),
    [
        ("serve.slot_tokens", "--slot-tokens", ["None", "1", "2", "3", "4"]),
        ("model.name", "--model", [Config().model.name, "1", "2", "3", "4"]),
    ],
)
def test_a_flag_wins_over_set_over_the_environment_over_a_file(
    setting: str, flag: str, values: list[str], tmp_path: Path
) -> None:
    section, _, name = setting.partition(".")
    env = {f"BLENDSERVE__{section}__{name}".upper(): "2"}
    file = config_file(tmp_path, f"{section}: {{{name}: '1'}}")
    word = "--set", f"{setting}=3"

    def used(*words: object, env: dict[str, str] | None = None) -> str:
        done = cli("serve", "--print-config", *words, env=env)
        return str(yaml.safe_load(done.out)[section][name])

    lines = (used(), used(*file), used(*file, env=env), used(*file, *word, env=env))
    assert [*lines, used(*file, *word, flag, "4", env=env)] == values


@pytest.mark.parametrize("where", ["file", "environment", "set", "flag"])
def test_a_misspelt_option_names_the_nearest(where: str, tmp_path: Path) -> None:
    env = dict[str, str]()
    words = config_file(tmp_path, "serve: {slots: 3}")
    if where == "file":
        words = config_file(tmp_path, "serve: {slots: 3, slot_tokns: 1}")
    elif where == "environment":
        env["BLENDSERVE__SERVE__SLOT_TOKNS"] = "1"
    else:
        words = *words, *(("--set", "serve.slot_tokns=1") if where == "set" else ("--slot-tokns", "1"))
    done = cli("serve", "--print-config", *words, env=env)
    assert (done.code, done.out) == (2, "")
    nearest = "--slot-tokens" if where == "flag" else "'serve.slot_tokens'"
    assert nearest in done.err.strip().splitlines()[-1]
