"""Decodes text in any encoding. Text whose encoding is not clear is refused, as wrong letters would go unnoticed.

Text that is not UTF-8 is read in an encoding if all its letters beyond ASCII are then of one language. If two encodings
fit, the text is refused. A library's guess is no help: charset-normalizer 3.5 read six of the 23 paragraphs of
tests/readers/test_encodings.py with wrong letters, such as Hebrew as Russian.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from blendserve.readers.base import MAX_LOG, MAX_TEXT, Unreadable, check_size

NUL = "has NUL characters, as UTF-16 without a mark and binary files have: save it as UTF-8 text"
BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as UTF-16's does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
ESCAPES = (b"\x1b$B", b"\x1b$@")  # by which ISO-2022-JP begins Japanese letters
PART = 4_000_000  # bytes of a text larger than MAX_TEXT
SAMPLE = 100_000  # bytes by which an encoding is detected

# Encodings of two bytes per letter, in the order in which they are tried, with the first bytes of the frequent letters of
# their standard, which is the second name. Japanese stands first, as its kana are letters of Big5; then Korean, whose
# syllables are letters of GB 2312.
TWO_BYTES = {
    "euc_jp": ("euc_jp", 0xB0, 0xCF),
    "cp932": ("euc_jp", 0xB0, 0xCF),
    "cp949": ("euc_kr", 0xB0, 0xC8),
    "gb18030": ("gb2312", 0xB0, 0xD7),
    "big5": ("big5", 0xA4, 0xC6),
}
FREQUENT = 0.95  # share of letters that must be frequent ones
ENOUGH = 16  # letters; fewer may be frequent ones of another language by chance
KANA = re.compile("[\u3041-\u30ff]")
LEAST_KANA = 0.2  # share of kana in Japanese; other languages have none
# Letters of two bytes, without signs and forms of ASCII.
WIDE = re.compile("[\u1100-\u1fff\u2e80-\u2fff\u3040-\ufeff\uff61-\U0010ffff]")

# Letters beyond ASCII of the languages that are written in an encoding of one byte a letter. Where the language does not
# have those of ASCII, the frequent ones stand first.
CENTRAL = "ąćęłńóśźż áčďéěíňóřšťúůýž áäčďéíĺľňóôŕšťúýž áéíóöőúüű ăâîşţ čćđšž"
CYRILLIC = (
    "оеаинтсрвлбгджзйкмпуфхцчшщъыьэюяё оаинівертсбгджзйклмпуфхцчшщьюяєїґ аоиенрстјубвгдђжзклљмњпћфхцчџш"
)
GREEK = "αοιετνσςηυβγδζθκλμξπρφχψωάέήίόύώϊϋΐΰ"
HEBREW = "יוהלארתשבמגדזחטךכםןנסעףפץצק"
ARABIC = "اليمنوتربه" + "".join(map(chr, range(0x621, 0x653))) + "پچژگ\u200c\u200d"
LATIN = {
    "cp1252": "äöüßé àâæçèéêëîïôœùûüÿ áéíñóúü áâãàçéêíóôõúü àèéìíîòóùú åäöæøé áéèëïíóöüú àçéèíïòóúü",
    "cp1250": CENTRAL,
    "iso8859_2": CENTRAL,
    "cp1254": "çğıöşüâîû",
}
OTHERS = {
    **dict.fromkeys(("cp1251", "koi8_r", "koi8_u", "cp866"), CYRILLIC),
    **dict.fromkeys(("cp1253", "iso8859_7"), GREEK),
    **dict.fromkeys(("cp1255", "iso8859_8"), HEBREW),
    **dict.fromkeys(("cp1256", "iso8859_6"), ARABIC),
}
N_FREQUENT = 10  # the most frequent letters
LEAST_FREQUENT = 0.5  # their share of a text; by a wrong encoding it is about a third
FOREIGN = 0.05  # share of letters and signs that may be of other languages
SIGNS = "–—‘’‚“”„‹›«»…•·†°§©®™€£¢¥±×÷µ²³¹ªº¼½¾¡¿№،؛؟\xa0\xad"
ASCII = re.compile("[a-zA-Z]")
WORD = re.compile(r"[^\W\d_²³¹ªº¼½¾µ]+")
SIGN = re.compile(r"[^\w\x00-\x7f]|[²³¹ªº¼½¾µ]")
INNER_SIGN = re.compile(r"(?<=[^\W\d_])(?:(?:[^\w\x00-\x7f’‘·–—\xa0\xad]|[²³¹ªº¼½¾µ])(?=[^\W\d_])|[‚„])")


def read_text(path: Path) -> tuple[str, str]:
    """Return a file's text, with "\\n" as the end of lines, and its encoding if it was detected. Raises Unreadable."""
    check_size(path, MAX_TEXT, "split it")
    text, encoding = decode(path.read_bytes())
    return text.replace("\r\n", "\n"), encoding


def read_parts(path: Path) -> Iterator[tuple[str, str]]:
    """Read a text as `read_text` does; one of more than MAX_TEXT bytes, in UTF-8, in parts that end with lines.

    Raises Unreadable.
    """
    if path.stat().st_size <= MAX_TEXT:
        yield read_text(path)
        return
    check_size(path, MAX_LOG, "split it")
    n_lines = 0
    with path.open("rb") as file:
        while part := file.read(PART):
            rest = file.readline(MAX_TEXT)
            part += rest
            if len(rest) == MAX_TEXT:
                what = f"has a line of more than {MAX_TEXT / 1e6:,.0f} MB: split it"
                raise Unreadable(what, line=n_lines + part.count(b"\n") + 1)
            if b"\0" in part:
                raise Unreadable(NUL, line=n_lines + part[: part.index(b"\0")].count(b"\n") + 1)
            try:
                text = part.decode("utf-8" if n_lines else "utf-8-sig")
            except UnicodeDecodeError as error:
                raise not_utf8(error, n_lines + part[: error.start].count(b"\n") + 1) from None
            yield text.replace("\r\n", "\n"), ""
            n_lines += part.count(b"\n")


def decode(data: bytes, declared: str = "") -> tuple[str, str]:
    """Return the text, and its encoding if it is not UTF-8. declared: the encoding that the text itself names.

    Raises Unreadable if the encoding is not clear, and for UTF-8 with wrong bytes.
    """
    for mark, encoding in BOMS:
        if data.startswith(mark):
            return _strictly(data, encoding), encoding.replace("utf-8-sig", "")
    if b"\0" in data:
        raise Unreadable(NUL, line=data[: data.index(b"\0")].count(b"\n") + 1)
    if any(escape in data for escape in ESCAPES):
        return _strictly(data, "iso2022_jp"), "iso2022_jp"
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        if _is_utf8(data, error):
            raise not_utf8(error) from None
    encoding = _known(declared) or _detect(data)
    return _strictly(data, encoding), encoding


def not_utf8(error: UnicodeDecodeError, line: int = 0) -> Unreadable:
    """Return the error for a byte that is not UTF-8. line: of the file; 0 if the text is the whole file."""
    found = line or error.object[: error.start].count(b"\n") + 1
    return Unreadable(f"is not UTF-8 (byte 0x{error.object[error.start]:02x}): save it as UTF-8", line=found)


def _strictly(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise Unreadable(f"is not {encoding} (byte 0x{bad:02x}): save it as UTF-8") from None


def _is_utf8(data: bytes, error: UnicodeDecodeError) -> bool:
    """Return whether text is UTF-8 except for a few bytes: another encoding would give wrong letters throughout."""
    if error.reason == "unexpected end of data" and error.end - error.start > 1:
        return True  # cut within a character
    text = data.decode("utf-8", "replace")
    n_wrong = text.count("\ufffd")
    return sum(char > "\x7f" for char in text) - n_wrong > n_wrong


def _known(encoding: str) -> str:
    """Return Python's name of a text encoding; "" for an unknown name or another codec."""
    try:
        codec = codecs.lookup(encoding)
    except (LookupError, ValueError):
        return ""
    is_text: bool = getattr(codec, "_is_text_encoding", True)
    return codec.name if is_text else ""


def _detect(data: bytes) -> str:
    """Detect the encoding of text that is not UTF-8. Raises Unreadable if its letters do not tell it."""
    sample = b"\n".join(line for line in data.split(b"\n") if not line.isascii())[:SAMPLE]
    alike = list[str]()
    for encoding in TWO_BYTES:
        n = _wide_letters(sample, encoding)
        if n >= ENOUGH:
            return encoding
        if n:
            alike.append(encoding)
    is_short = bool(alike)
    alike += _single_byte(sample)
    if len(alike) == 1 and not is_short:
        return alike[0]
    names = f"may be {' or '.join(alike[:4])}" if alike else "is none that is known"
    raise Unreadable(f"is not UTF-8, and its encoding {names}: save it as UTF-8")


def _wide_letters(sample: bytes, encoding: str) -> int:
    """Count the letters in an encoding of two bytes; 0 if they are not text of its language."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)  # the sample may end within a letter
    except UnicodeDecodeError:
        return 0
    counts = Counter(WIDE.findall(text))
    n = sum(counts.values())
    n_kana = sum(counts[char] for char in counts if KANA.match(char))
    if TWO_BYTES[encoding][0] == "euc_jp" and n_kana < LEAST_KANA * n:
        return 0
    n_frequent = n_kana + sum(counts[char] for char in counts if char in _frequent(encoding))
    return n if n_frequent >= FREQUENT * n else 0


@cache
def _frequent(encoding: str) -> frozenset[str]:
    standard, first, last = TWO_BYTES[encoding]
    pairs = (bytes([lead, trail]) for lead in range(first, last + 1) for trail in range(0x40, 0xFF))
    return frozenset(char for pair in pairs if len(char := pair.decode(standard, "ignore")) == 1)


def _single_byte(sample: bytes) -> list[str]:
    """Return the encodings of one byte per letter that give text of a language; one of those that give the same."""
    found = dict[str, str]()
    for encoding, alphabets in {**LATIN, **OTHERS}.items():
        text = sample.decode(encoding, "replace")
        is_text = _is_latin if encoding in LATIN else _is_other
        if any(is_text(text, alphabet) for alphabet in alphabets.split()):
            found.setdefault(text, encoding)
    return list(found.values())


def _is_latin(text: str, alphabet: str) -> bool:
    """Return whether a text's letters beyond ASCII are of the alphabet, and stand in words with ASCII letters."""
    words = [word for word in WORD.findall(text) if not word.isascii()]
    n = sum(char > "\x7f" for word in words for char in word)
    n_alone = sum(len(word) for word in words if len(word) > 1 and all(char > "\x7f" for char in word))
    return ASCII.search(text) is not None and n_alone + _n_wrong(text, words, alphabet) <= FOREIGN * n


def _is_other(text: str, alphabet: str) -> bool:
    """Return whether a text's words beyond ASCII are of the alphabet alone, and have its frequent letters."""
    words = [word for word in WORD.findall(text) if not word.isascii()]
    letters = "".join(words)
    n_upper = sum(char.isupper() for char in letters)
    n_frequent = sum(char.lower() in alphabet[:N_FREQUENT] for char in letters)
    is_likely = n_frequent >= LEAST_FREQUENT * len(letters) and n_upper <= len(letters) / 2
    n_most_wrong = FOREIGN / 2 * len(letters)
    return len(letters) >= ENOUGH and is_likely and _n_wrong(text, words, alphabet) <= n_most_wrong


def _n_wrong(text: str, words: Sequence[str], alphabet: str) -> int:
    """Count the letters and signs that text of the language would not have, or not in these places."""
    letters = sum(char > "\x7f" and char.lower() not in alphabet for word in words for char in word)
    capitals = sum(not word.isupper() and word[1:] != word[1:].lower() for word in words)
    signs = sum(sign not in SIGNS and sign not in alphabet for sign in SIGN.findall(text))
    signs += sum(sign not in alphabet for sign in INNER_SIGN.findall(text))
    unclosed = sum(map(text.count, "‚„")) - sum(map(text.count, "‘’“”"))  # letters of DOS's encodings
    return letters + capitals + signs + max(0, unclosed)
