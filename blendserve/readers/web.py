"""Web pages and books as Markdown, without navigation, by trafilatura."""

from __future__ import annotations

import posixpath
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from blendserve.readers.base import MAX_TEXT, Content, Unreadable, check_archive, check_size, join
from blendserve.readers.encodings import decode

_CHARSET = re.compile(rb"<meta[^>]+charset=[\"']?([\w-]+)", re.IGNORECASE)
_CONTAINER = "META-INF/container.xml"


def read_html(path: Path) -> Iterator[Content]:
    """The main text of a page, titled as the page."""
    import trafilatura  # in the child alone

    check_size(path, MAX_TEXT, "split it")
    html, encoding = decoded(path.read_bytes())
    found = trafilatura.extract_metadata(html)
    yield Content(main_text(html), (found and found.title) or None, note=encoding)


def read_epub(path: Path) -> Iterator[Content]:
    """The chapters of a book in their order."""
    check_archive(path)
    with zipfile.ZipFile(path) as book:
        package = _xml(book.read(_CONTAINER)).find(".//{*}rootfile")
        name = "" if package is None else package.get("full-path", "")
        root = _xml(book.read(name))
        files = {item.get("id"): item.get("href", "") for item in root.iterfind("{*}manifest/{*}item")}
        order = [files.get(item.get("idref"), "") for item in root.iterfind("{*}spine/{*}itemref")]
        places = [posixpath.join(posixpath.dirname(name), unquote(file)) for file in order if file]
        text = join(main_text(decoded(book.read(place))[0]) for place in places)
        yield Content(
            text, (root.findtext(".//{http://purl.org/dc/elements/1.1/}title") or "").strip() or None
        )


def decoded(html: bytes) -> tuple[str, str]:
    """The text of a page, and its encoding if it is not UTF-8."""
    declared = _CHARSET.search(html, 0, 4096)
    return decode(html, declared.group(1).decode() if declared else "")


def main_text(html: str) -> str:
    """The main text of a page as Markdown; of a page without one, all its text."""
    import trafilatura  # in the child alone

    if "<body" not in html.lower():
        html = f"<html><body>{html}</body></html>"  # a fragment, as in messages
    options = {"output_format": "markdown", "include_tables": True, "favor_recall": True}
    text: str = trafilatura.extract(html, **options) or trafilatura.html2txt(html)
    return text


def _xml(data: bytes) -> ElementTree.Element:
    """Raises Unreadable for XML with a document type, whose entities may grow without bound."""
    if b"<!ENTITY" in data:
        raise Unreadable("defines XML entities, which are not read")
    return ElementTree.fromstring(data)
