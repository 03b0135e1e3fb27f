"""PDF files, by PDFium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from blendserve.readers.base import MAX_FILE, Content, Unreadable, check_size, join


def read(path: Path) -> Iterator[Content]:
    """Read the text of all pages. Raises Unreadable for an encrypted file; a scanned one is empty, with a note."""
    import pypdfium2  # in the child alone

    check_size(path, MAX_FILE, "split it")
    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("is encrypted: save it without a password") from None
        raise
    with closing(document):
        text = join(_page(page) for page in document)
        scanned = f"no text in {len(document)} pages, probably scanned: recognise it (OCR) first"
        yield Content(text, note="" if text else scanned)


def _page(page: Any) -> str:
    """Return the text of a page, without the U+FFFE and U+0002 by which PDFium marks hyphens at ends of lines."""
    with closing(page), closing(page.get_textpage()) as content:
        text: str = content.get_text_bounded()
    for mark in ("\ufffe\r\n", "\x02\r\n", "\ufffe", "\x02", "\0"):
        text = text.replace(mark, "")
    return text.replace("\r\n", "\n").strip()
