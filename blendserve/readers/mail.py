"""E-mail messages."""

from __future__ import annotations

from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path

from blendserve.readers.base import MAX_TEXT, Content, Unreadable, check_size, join
from blendserve.readers.web import main_text

HEADERS = ("From", "To", "Date", "Subject")


def read(path: Path) -> Iterator[Content]:
    """Read headers and text of a message, titled by its subject; attachments are named in the note, not read."""
    check_size(path, MAX_TEXT, "save its attachments as files")
    message = message_from_bytes(path.read_bytes(), policy=policy.default)
    assert isinstance(message, EmailMessage)
    headers = [f"{name}: {message[name]}" for name in HEADERS if message[name]]
    if not headers:
        raise Unreadable("is no e-mail message: it has no headers")
    body = message.get_body(("plain", "html"))
    text = "" if body is None else str(body.get_content())
    if body is not None and body.get_content_subtype() == "html":
        text = main_text(text)
    left = [part.get_filename() or part.get_content_type() for part in message.iter_attachments()]
    note = f"attachments not read: {', '.join(left)}" if left else ""
    text = text.replace("\r\n", "\n").strip()
    yield Content(
        join(["\n".join(headers), text]) if text else "", str(message["Subject"] or "") or None, note=note
    )
