"""A folder of 60 files of 14 kinds, from text of docs/: good ones, and all that can be wrong with one.

    python -m tests.support.corpus_files FOLDER [--large]

It needs the extra `documents`. --large: with a log of 1 GB, which is sparse.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zipfile
from collections.abc import Sequence
from email.message import EmailMessage
from pathlib import Path
from textwrap import wrap

DOCS = Path(__file__).parents[2] / "docs"
CHINESE = "水泵把水从井里抽到水箱里。每个月都需要给水泵加油。请注意安全，不要在雨天打开电箱。\n"
FRENCH = "Le café où l'été est très agréable, déjà vu à l'école.\n"
GERMAN = "Die Pumpe fördert täglich größere Mengen in den Behälter – geprüft und bestätigt.\n"
ENTITIES = '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa">' + "".join(
    f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def texts() -> list[str]:
    """Pages of docs/explanation, each of a few thousand characters."""
    return [path.read_text("utf-8") for path in sorted(DOCS.glob("explanation/*.md"))]


def make(folder: Path, large: bool = False) -> dict[str, str]:
    """Write the files -> the state of each after it was read."""
    pages, files = texts(), dict[str, tuple[bytes, str]]()
    for group in (_plain(pages), _data(pages), _office(pages), _web(pages), _pdfs(pages)):
        files |= group
    for name, (content, _) in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    size = 1_000_000_000 if large else 40_000_000
    with (folder / "machine.log").open("wb") as log:
        log.write(b"2026-01-01 12:00:00 started\n")
        log.truncate(size)
    return {name: state for name, (_, state) in files.items()} | {"machine.log": "failed"}


def _plain(pages: Sequence[str]) -> dict[str, tuple[bytes, str]]:
    code = Path(__file__).read_bytes()
    rst = "Pumps\n=====\n\nA pump moves water.\n\nTools\n-----\n\nA wrench.\n"
    return {
        "notes/one.txt": (pages[0].encode(), "read"),
        "notes/latin1.txt": (FRENCH.encode("latin-1") * 3, "read"),
        "notes/german.txt": (GERMAN.encode("cp1252") * 3, "read"),
        "notes/utf16.txt": (pages[1].encode("utf-16"), "read"),
        "notes/gb18030.txt": (CHINESE.encode("gb18030") * 3, "read"),
        "notes/bom.txt": (b"\xef\xbb\xbf" + pages[2].encode(), "read"),
        "notes/cut.txt": (CHINESE.encode()[:-2], "failed"),
        "notes/one-wrong-byte.txt": (CHINESE.encode() + b"\xff" + CHINESE.encode(), "failed"),
        "notes/unclear.txt": ("水泵".encode("gb18030"), "failed"),
        "notes/binary.txt": (bytes(range(256)), "failed"),
        "notes/blank.txt": (b" \n\n", "empty"),
        "notes/empty.md": (b"", "empty"),
        **{f"manual/{n}.md": (page.encode(), "read") for n, page in enumerate(pages[:5])},
        "manual/pump.rst": (rst.encode(), "read"),
        "code/corpus.py": (code, "read"),
        "code/main.go": (b"package main\n\nfunc main() {\n}\n", "read"),
        "code/pump.c": (b"int main(void) { return 0; }\n", "read"),
        "code/pump.sql": (b"SELECT 1;\n", "read"),
        "LICENSE": (b"Apache", "skipped"),
        "picture.png": (b"\x89PNG\r\n\x1a\n", "skipped"),
        ".env": (b"hidden", "skipped"),
    }


def _data(pages: Sequence[str]) -> dict[str, tuple[bytes, str]]:
    lines = [json.dumps({"text": page, "title": f"Page {n}"}) for n, page in enumerate(pages[4:7])]
    found = [
        {"page_content": page, "metadata": {"source": "x.pdf", "page": n}} for n, page in enumerate(pages[:2])
    ]
    rows, prices = io.StringIO(), io.StringIO()
    csv.writer(rows).writerows([["part", "price"], *([f"part {n}", n] for n in range(400))])
    csv.writer(prices, delimiter=";").writerows([["Teil", "Preis"], ["Dichtung für Pumpe", "3,50"]])
    return {
        "data/pages.jsonl": ("\n".join(lines).encode(), "read"),
        "data/pages.jsonl.gz": (gzip.compress("\n".join(lines).encode()), "read"),
        "data/langchain.json": (json.dumps(found).encode(), "read"),
        "data/pretty.json": (json.dumps([{"text": "One."}], indent=2).encode(), "read"),
        "data/broken.jsonl": (b'{"text": "fine"}\n{"text": 1}\n', "failed"),
        "data/cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "failed"),
        "data/settings.json": (b'{"indent": 2}', "failed"),
        "data/parts.csv": (rows.getvalue().encode(), "read"),
        "data/prices.csv": (prices.getvalue().encode("cp1252"), "read"),
        "data/empty.csv": (b"", "empty"),
        "data/parts.tsv": (b"part\tprice\nseal\t3\n", "read"),
    }


def _office(pages: Sequence[str]) -> dict[str, tuple[bytes, str]]:
    import docx
    import openpyxl
    import pptx

    word, slides, book = docx.Document(), pptx.Presentation(), openpyxl.Workbook()
    word.add_heading("Pumps", 1)
    for paragraph in pages[3].split("\n\n"):
        word.add_paragraph(paragraph)
    table = word.add_table(2, 2)
    for cell, text in zip(table._cells, ("part", "price", "seal", "3"), strict=True):  # allow: python-docx's
        cell.text = text
    slide = slides.slides.add_slide(slides.slide_layouts[1])
    slide.shapes.title.text, slide.placeholders[1].text = "Pumps", "A pump moves water."
    for row in (["part", "price"], ["seal", 3], ["wrench", 12.5]):
        book.active.append(row)
    saved = dict[str, bytes]()
    for name, made in (
        ("pumps.docx", word),
        ("pumps.pptx", slides),
        ("parts.xlsx", book),
        ("blank.docx", docx.Document()),
    ):
        buffer = io.BytesIO()
        made.save(buffer)
        saved[f"office/{name}"] = buffer.getvalue()
    whole = saved["office/pumps.docx"]
    return {
        **{name: (content, "empty" if "blank" in name else "read") for name, content in saved.items()},
        "office/cut.docx": (whole[: len(whole) // 2], "failed"),
        "office/encrypted.docx": (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(4096), "failed"),
        "office/really-html.docx": (b"<html><p>text</p></html>", "failed"),
        "office/bomb.xlsx": (_zipped({"xl/workbook.xml": bytes(600_000_000)}), "failed"),
        "office/entities.docx": (
            _replaced(whole, "word/document.xml", ENTITIES.encode() + b"]><a>&i;</a>"),
            "failed",
        ),
    }


def _web(pages: Sequence[str]) -> dict[str, tuple[bytes, str]]:
    body = "".join(f"<p>{paragraph}</p>" for paragraph in pages[4].split("\n\n"))
    page = f"<html><head><title>Pumps</title></head><body><nav>Home</nav><h1>Pumps</h1>{body}</body></html>"
    french = f'<html><head><meta charset="iso-8859-1"></head><body><p>{FRENCH * 5}</p></body></html>'
    mail, with_file = EmailMessage(), EmailMessage()
    mail["Subject"], with_file["Subject"] = "Pumps", "A file"
    mail.set_content(pages[0])
    with_file.set_content("<p>See the file, which has all prices of this year.</p>", subtype="html")
    with_file.add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="prices.pdf")
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="a" href="a.xhtml"/></manifest>'
        '<spine><itemref idref="a"/></spine></package>'
    )
    container = '<container><rootfiles><rootfile full-path="o/p.opf"/></rootfiles></container>'
    book = {
        "META-INF/container.xml": container.encode(),
        "o/p.opf": package.encode(),
        "o/a.xhtml": page.encode(),
    }
    bad = book | {"o/p.opf": ENTITIES.encode() + b"]><a>&i;</a>"}
    return {
        "web/pumps.html": (page.encode(), "read"),
        "web/french.html": (french.encode("latin-1"), "read"),
        "web/empty.html": (b"<html><body></body></html>", "empty"),
        "mail/pumps.eml": (mail.as_bytes(), "read"),
        "mail/with-file.eml": (with_file.as_bytes(), "read"),
        "books/pumps.epub": (_zipped(book), "read"),
        "books/entities.epub": (_zipped(bad), "failed"),
    }


def _pdfs(pages: Sequence[str]) -> dict[str, tuple[bytes, str]]:
    few = [wrap(page.encode("ascii", "replace").decode(), 90)[:50] for page in pages[:3]]
    return {
        "pdf/three-pages.pdf": (pdf(few), "read"),
        "pdf/300-pages.pdf": (pdf(few * 100), "read"),
        "pdf/scanned.pdf": (pdf([[]] * 2), "empty"),
        "pdf/encrypted.pdf": (pdf(few, encrypted=True), "failed"),
        "pdf/damaged.pdf": (pdf(few)[:300], "failed"),
        "pdf/really-text.pdf": (pages[0].encode(), "failed"),
        "pdf/empty.pdf": (b"", "failed"),
    }


def pdf(pages: Sequence[Sequence[str]], encrypted: bool = False) -> bytes:
    """A PDF file with these lines on its pages. encrypted: with a password that nobody knows."""
    first = 4
    numbers = [first + 2 * n for n in range(len(pages))]
    kids = " ".join(f"{n} 0 R" for n in numbers)
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for n, lines in zip(numbers, pages, strict=True):
        shown = [re.sub(r"([()\\])", r"\\\1", line) for line in lines]
        stream = "BT /F1 9 Tf 12 TL 40 800 Td " + " ".join(f"({line}) Tj T*" for line in shown) + " ET"
        resources = "/Resources<</Font<</F1 3 0 R>>>>"
        objects.append(f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Contents {n + 1} 0 R{resources}>>")
        objects.append(f"<</Length {len(stream)}>>\nstream\n{stream}\nendstream")
    out, offsets = "%PDF-1.4\n", list[int]()
    for n, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{n} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    lock = f"/Encrypt<</Filter/Standard/V 1/R 2/P -4/O<{'41' * 32}>/U<{'42' * 32}>>>/ID[<41><41>]"
    trailer = f"trailer\n<</Size {len(objects) + 1}/Root 1 0 R{lock if encrypted else ''}>>"
    xref = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}\nstartxref\n{len(out)}\n%%EOF"
    return f"{out}{xref}".encode()


def _zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _replaced(archive: bytes, name: str, content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as old:
        return _zipped({each: content if each == name else old.read(each) for each in old.namelist()})


if __name__ == "__main__":
    made = make(Path(sys.argv[1]), "--large" in sys.argv[2:])
    print(f"{len(made)} files")
