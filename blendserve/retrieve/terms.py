"""The words of a text, and the row of a passage that has them.

A word is kept as a hash of 32 bits. Of scripts without spaces, each pair of characters is a word.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter

import numpy as np

WORD = re.compile(r"[^\W_]+")
PAIRED = re.compile(
    r"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]+"
)


def words_of(text: str) -> list[str]:
    """Return the words of a text, without case and accents."""
    if text.isascii():
        return WORD.findall(text.lower())
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    found = list[str]()
    for word in WORD.findall(plain):
        at = 0
        for run in PAIRED.finditer(word):
            found += [word[at : run.start()]] * (run.start() > at)
            found += [run[0][n : n + 2] for n in range(max(1, len(run[0]) - 1))]
            at = run.end()
        found += [word[at:]] * (at < len(word))
    return found


def pack(text: str) -> bytes:
    """Pack the words of a passage for its row: hashes, counts of at most 255, a checksum."""
    counts = sorted(Counter(map(hash_of, words_of(text))).items())
    hashes = np.array([hash for hash, _ in counts], "<u4").tobytes()
    content = hashes + bytes(min(255, n) for _, n in counts)
    return content + zlib.crc32(content).to_bytes(4, "little")


def unpack(content: bytes) -> tuple[bytes, bytes]:
    """Unpack a row into hashes as uint32 and counts as uint8. Raises ValueError for a wrong checksum."""
    words, checksum = content[:-4], content[-4:]
    if zlib.crc32(words).to_bytes(4, "little") != checksum:
        raise ValueError("the words of a passage do not match their checksum")
    end = len(words) // 5 * 4
    return words[:end], words[end:]


def hash_of(word: str) -> int:
    """Return a hash of 32 bits."""
    return zlib.crc32(word.encode())
