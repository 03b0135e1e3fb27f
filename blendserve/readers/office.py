"""Word, PowerPoint and Excel files as Markdown: headings, paragraphs, lists and tables in their order."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from blendserve.readers.base import Content, check_archive, join
from blendserve.readers.tables import markdown

_LEVEL = re.compile(r"heading (\d)", re.IGNORECASE)


def read_docx(path: Path) -> Iterator[Content]:
    """Read a Word document, titled by its properties."""
    import docx  # in the child alone
    from docx.table import Table

    check_archive(path)
    document = docx.Document(str(path))
    parts = (
        markdown([cell.text for cell in row.cells] for row in part.rows)
        if isinstance(part, Table)
        else _paragraph(part)
        for part in document.iter_inner_content()
    )
    yield Content(join(parts), document.core_properties.title or None)


def read_pptx(path: Path) -> Iterator[Content]:
    """Read a presentation: one section per slide, with its notes."""
    import pptx  # in the child alone

    check_archive(path)
    presentation = pptx.Presentation(str(path))
    slides = (_slide(slide, n) for n, slide in enumerate(presentation.slides, 1))
    yield Content(join(slides), presentation.core_properties.title or None)


def read_xlsx(path: Path) -> Iterator[Content]:
    """Read the sheets of a workbook, with the saved values of formulas."""
    import openpyxl  # in the child alone

    check_archive(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts that openpyxl leaves out, such as charts
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    with closing(book):
        yield Content(join(_sheet(sheet) for sheet in book.worksheets))


def _paragraph(paragraph: Any) -> str:
    text = paragraph.text.strip()
    style = (paragraph.style.name or "") if paragraph.style else ""
    if not text:
        return ""
    if level := _LEVEL.match(style):
        return f"{'#' * int(level.group(1))} {' '.join(text.split())}"
    if style == "Title":
        return f"# {' '.join(text.split())}"
    return f"- {text}" if style.startswith("List") else text


def _slide(slide: Any, n: int) -> str:
    title = slide.shapes.title
    named = title is not None and title.has_text_frame and title.text_frame.text.strip()
    heading = f"## {' '.join(named.split())}" if named else f"## Slide {n}"
    texts = [_shape(shape) for shape in slide.shapes if title is None or shape.shape_id != title.shape_id]
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        texts.append(slide.notes_slide.notes_text_frame.text)
    body = join(texts)
    return join([heading, body]) if named or body else ""


def _shape(shape: Any) -> str:
    """Return the text of a shape, or of all shapes in a group."""
    if hasattr(shape, "shapes"):
        return join(_shape(inner) for inner in shape.shapes)
    if shape.has_table:
        return markdown([cell.text for cell in row.cells] for row in shape.table.rows)
    text: str = shape.text_frame.text if shape.has_text_frame else ""
    return text.replace("\v", "\n").strip()


def _sheet(sheet: Any) -> str:
    sheet.reset_dimensions()  # what the file says of them may be wrong
    table = markdown(sheet.iter_rows(values_only=True))
    return f"## {sheet.title}\n\n{table}" if table else ""
