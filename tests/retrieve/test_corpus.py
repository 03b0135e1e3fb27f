"""Files are read whole or named with the reason, whatever they are; a foreign file's time and memory are bounded."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Document
from blendserve.errors import CorpusError
from blendserve.readers import encodings
from blendserve.readers.base import MAX_LOG, MAX_TEXT, Unreadable
from blendserve.readers.child import Child
from blendserve.retrieve import ReadReport, read_documents
from tests.support.corpus_files import CHINESE, make


def test_jsonl_gives_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one", "title": " T ", "id": "a", "year": 3}\r\n\n'
        b'{"text": "two", "id": 7, "title": null}\n' + '{"text":"3\u2028\x85 漢"}'.encode()
    )
    third = Document("3\u2028\x85 漢")
    assert list(read_documents(path)) == [Document("one", "T", "a"), Document("two", "", "7"), third]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        (b"{text: 1}", None),
        (b"[" * 100_000, None),
        (b'["text"]', None),
        (b'{"text": "caf\xe9"}', None),
        (b'{"title": "x"}', "text"),
        (b'{"page_content": 5}', "text"),
        (b'{"text": null}', "text"),
        (b'{"text": 5}', "text"),
        (b'{"text": " \\n"}', "text"),
        (b'{"text": "\\ud83d"}', "text"),
        (b'{"text": "t\\u0000e\\u0000"}', "text"),
        (b'{"text": "a\0"}', None),
        (b'{"text": "a", "title": []}', "title"),
        (b'{"text": "a", "id": true}', "id"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, field: str | None) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(CorpusError) as error:
        list(read_documents(path))
    assert (error.value.path, error.value.line, error.value.setting) == (str(path), 2, field)


def test_a_folder_is_read_in_order_with_headings_as_titles(tmp_path: Path) -> None:
    for name, text in {
        "b.txt": "bee\r\nline",
        "a/z.md": "```\n# code\n```\n## The *Zed* ##\ntext",
        "a/plain.md": "no heading",
        "a.TXT": "\ufeffbom",
        "blank.txt": " \n",
        "picture.png": "not read",
        ".hidden/x.txt": "hidden",
        "lines.jsonl": '{"text": "of a line", "id": "own"}',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    found = list(read_documents(tmp_path))
    assert [(d.id, d.title) for d in found] == [
        *(("a/plain.md", "a/plain"), ("a/z.md", "The *Zed*"), ("a.TXT", "a"), ("b.txt", "b"), ("own", ""))
    ]
    assert [d.text for d in found if d.id in ("a.TXT", "b.txt")] == ["bom", "bee\nline"]
    assert list(read_documents(tmp_path / "b.txt")) == [Document("bee\nline", "b", "b.txt")]


def test_json_is_read_in_its_other_forms(tmp_path: Path) -> None:
    pages = [{"page_content": "one", "metadata": {"title": "T"}}, {"text": "two", "id": 2}]
    wanted = [Document("one", "T"), Document("two", "", "2")]
    lines = "\n".join(map(json.dumps, pages)).encode()
    for name, content in {
        "lines.json": lines,
        "array.json": json.dumps(pages).encode(),
        "indented.json": b"\xef\xbb\xbf\n" + json.dumps(pages, indent=2).encode(),
        "lines.jsonl.gz": gzip.compress(lines),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert list(read_documents(tmp_path / name)) == wanted, name
    (tmp_path / "one.json").write_text(json.dumps(pages[1], indent=2))
    assert list(read_documents(tmp_path / "one.json")) == wanted[1:]


def test_a_csv_file_is_a_table_whatever_its_delimiter(tmp_path: Path) -> None:
    table = "| a b | c\\|d |\n| --- | --- |\n| 1, 2 | x y |"
    for name, content in {
        "comma.csv": 'a b,c|d\n\n"1, 2","x\ny"\n',
        "semicolon.csv": 'a b;c|d\n1, 2;"x\ny"\n',
        "tab.tsv": "a b\tc|d\r\n1, 2\tx y\r\n",
    }.items():
        (tmp_path / name).write_bytes(content.encode())
        assert [d.text for d in read_documents(tmp_path / name)] == [table], name


FILES = {  # name -> content; the state that it is read with
    b"read.txt": (b"text", "read"),
    b"bad\xff\xfename.md": (b"text", "read"),
    b"sub/\xc3\x9cber.txt": (b"\xef\xbb\xbftext", "read"),
    b"latin1.txt": (b"caf\xe9", "read"),
    b"utf16.txt": ("text".encode("utf-16"), "read"),
    b"utf16-without-mark.md": ("text".encode("utf-16-le"), "failed"),
    b"cut.txt": ("漢".encode()[:2], "failed"),
    b"blank.txt": (b" \n", "empty"),
    b"a.doc": (b"%PDF-1.7", "skipped"),
    b"LICENSE": (b"text", "skipped"),
    b"odd.\xff": (b"text", "skipped"),
    b".env": (b"text", "skipped"),
    b".git/x.txt": (b"text", ""),  # its folder has the entry
}
LINKS = {b"linked": b"sub", b"loop": b".", b"broken.txt": b"nowhere.txt"}


@given(st.sets(st.sampled_from(sorted(FILES))), st.sets(st.sampled_from(sorted(LINKS))))
def test_every_file_of_a_folder_is_read_or_named(names: set[bytes], links: set[bytes]) -> None:
    with TemporaryDirectory() as made:
        folder, report = os.fsencode(made), ReadReport()
        for name in names:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(os.fsdecode(path)).write_bytes(FILES[name][0])
        for name in links:
            os.symlink(LINKS[name], os.path.join(folder, name))
        found = list[Document]()
        with suppress(CorpusError):  # nothing was read
            found = list(read_documents(made, report))
        wanted = {n.decode("utf-8", "backslashreplace"): FILES[n][1] for n in names if FILES[n][1]}
        wanted |= {name.decode(): "skipped" for name in links}
        wanted |= {".git": "skipped"} if b".git/x.txt" in names else {}
        assert {file.name: file.state for file in report.files} == wanted
        assert len(report.files) == len(wanted)
        assert {d.id for d in found} == {name for name, state in wanted.items() if state == "read"}
        assert {f.name for f in report.files if f.state != "read"} <= {f.name for f in report.notes}
        for text in (*report.lines(), *(d.id + d.title for d in found)):
            text.encode()  # as UTF-8, whatever the file's name is
        with suppress(CorpusError):
            assert len(list(read_documents(made, strict=True))) == len(found)
            assert all(state == "read" or name in (".env", ".git") for name, state in wanted.items())


@pytest.mark.parametrize(
    ("name", "line"), [("utf16-without-mark.md", 1), ("cut.txt", 1), ("blank.txt", None), ("a.doc", None)]
)
def test_a_file_that_is_not_read_is_refused_by_name(name: str, line: int | None, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name.encode()][0])
    with pytest.raises(CorpusError) as error:
        list(read_documents(path))
    assert (error.value.path, error.value.line) == (str(path), line)


def test_missing_empty_and_unknown_corpora_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "book.doc").write_text("x")
    (tmp_path / "folder").mkdir()
    for name in ("nowhere.jsonl", "empty.jsonl", "empty.txt", "book.doc", "folder"):
        with pytest.raises(CorpusError) as error:
            list(read_documents(tmp_path / name))
        assert error.value.path == str(tmp_path / name)


def test_a_folder_of_all_kinds_is_read_as_it_should_be(tmp_path: Path) -> None:
    for package in ("docx", "pptx", "openpyxl", "pypdfium2", "trafilatura"):
        pytest.importorskip(package)
    wanted, report = make(tmp_path), ReadReport()
    found = {d.id: d for d in read_documents(tmp_path, report)}
    assert {file.name: file.state for file in report.files} == wanted
    assert len(wanted) >= 60
    said = "\n".join(report.lines())
    assert all(file.name in said and file.note for file in report.files if file.state != "read")
    for name in (
        "office/pumps.docx",
        "office/pumps.pptx",
        "web/pumps.html",
        "books/pumps.epub",
    ):
        assert "pump" in f"{found[name].title} {found[name].text}".lower()
    assert "| seal | 3 |" in found["office/pumps.docx"].text
    assert found["office/parts.xlsx"].text.endswith("| seal | 3 |\n| wrench | 12.5 |")
    assert "Home" not in found["web/pumps.html"].text
    assert found["notes/gb18030.txt"].text == CHINESE * 3
    assert found["pdf/300-pages.pdf"].text.count(found["pdf/three-pages.pdf"].text) == 100
    assert found["mail/pumps.eml"].title == "Pumps"


@pytest.mark.parametrize("reader", ["forever", "memory", "much", "abort"])
def test_a_file_that_takes_all_ends_neither_this_process_nor_the_next_file(
    reader: str, tmp_path: Path
) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo")
    with closing(Child(timeout_s=5.0)) as child:
        for _ in range(1 if reader == "forever" else 2):
            with pytest.raises(Unreadable):
                child.read(f"tests.support.foreign_readers:{reader}", file)
            found = child.read("tests.support.foreign_readers:lines", file)
            assert [content.text for content in found] == ["one", "two"]


def test_other_packages_bring_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "more_readers-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: more-readers\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[blendserve.readers]\nlst = tests.support.foreign_readers:lines\n"
    )
    (tmp_path / "a.lst").write_text("one\ntwo")
    with pytest.raises(CorpusError):
        list(read_documents(tmp_path / "a.lst"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = list(read_documents(tmp_path / "a.lst"))
    assert [(d.text, d.id) for d in found] == [("one", "a.lst"), ("two", "a.lst#2")]


def test_a_large_file_is_refused_by_its_size_before_it_is_read(tmp_path: Path) -> None:
    for name, limit in (("large.log", MAX_LOG), ("large.csv", MAX_TEXT), ("large.json", MAX_TEXT)):
        with (tmp_path / name).open("wb") as file:
            file.write(b"[1,\n")
            file.truncate(limit + 1)
    with gzip.open(tmp_path / "large.jsonl.gz", "wb") as packed:
        packed.write(b" " * (MAX_TEXT + 9))
    (tmp_path / "small.txt").write_text("small")
    report = ReadReport()
    assert [d.id for d in read_documents(tmp_path, report)] == ["small.txt"]
    assert [file.state for file in report.files if "large" in file.name] == ["failed"] * 4


@given(
    lines=st.lists(st.sampled_from(["", "a", "two words", "水泵", "a line of more characters"]), min_size=12)
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_large_log_is_read_in_parts_that_end_with_lines(lines: list[str], end: str) -> None:
    whole = "".join(f"{line}{end}" for line in ["start", *lines, "水" * 9])
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "MAX_TEXT", 40)
        patch.setattr(encodings, "PART", 7)
        file = Path(folder, "machine.log")
        file.write_bytes(b"\xef\xbb\xbf" + whole.encode())
        found = list(read_documents(folder))
        assert [d.id for d in found] == [
            "machine.log",
            *(f"machine.log#{n + 2}" for n in range(len(found) - 1)),
        ]
        assert len(found) > 1
        assert "".join(line for d in found for line in d.text.split("\n")) == "".join(
            ["start", *lines, "水" * 9]
        )
        assert all(d.text.endswith("\n") and "\r" not in d.text for d in found)


@pytest.mark.parametrize("wrong", [b"\xff\n", b"\0\n", b"a" * 60 + b"\n"])
@pytest.mark.parametrize("before", [1, 2, 9, 30])
def test_a_large_log_with_a_wrong_line_is_not_read_and_the_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bytes, before: int
) -> None:
    monkeypatch.setattr(encodings, "MAX_TEXT", 40)
    monkeypatch.setattr(encodings, "PART", 16)
    (tmp_path / "machine.log").write_bytes(b"a line\n" * before + wrong + b"a line\n" * 9)
    (tmp_path / "other.txt").write_text("other")
    report = ReadReport()
    assert [d.id for d in read_documents(tmp_path, report)] == ["other.txt"]
    assert [(file.state, file.line) for file in report.notes] == [("failed", before + 1)]
