"""Checks the B-tree of an LMDB file before LMDB follows it: a flipped bit in a page number would end the process.

LMDB trusts its pages. So all branch and leaf pages of the last commit are walked when a store is opened: page numbers,
flags, and the bounds of nodes. The records have checksums of their own (record.py), and large ones lie on pages of their
own, which are not read here. The layout is that of LMDB 0.9, `mdb.c`, structures MDB_page, MDB_node and MDB_meta.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8  # flags of a page
BIG = 1  # flag of a node: its value is on pages of its own
HEADER, NODE = 16, 8  # bytes
NO_PAGE = 2**64 - 1
MAX_DEPTH = 32

_HEADER = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_META = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_TREE = struct.Struct("<IHHQQQQQ")  # size of a page, flags, depth, numbers of pages and entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction
_MAGIC = 0xBEEFC0DE


class DamagedPages(Exception):
    """The tree refers to what is no page, or a page to what is no node."""


@dataclass(frozen=True, slots=True)
class _Commit:
    page_bytes: int
    trees: tuple[tuple[int, int], ...]  # depth and root: of the list of free pages, and of the records
    last_page: int


def check_pages(data: Path, transaction: int) -> bool:
    """Walk the pages of a commit that a reader holds; False if a writer has replaced it meanwhile.

    Raises DamagedPages, OSError.
    """
    file = os.open(data, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        commit = _commit(file, transaction)
        if commit is None:
            return False
        walk = _Walk(file, commit)
        (free_depth, free_root), (depth, root) = commit.trees
        walk.tree(free_root, free_depth, is_free_list=True)
        walk.tree(root, depth)
        if walk.live & walk.free:
            raise DamagedPages(f"page {min(walk.live & walk.free)} is in use and free")
        return True
    finally:
        os.close(file)


def _commit(file: int, transaction: int) -> _Commit | None:
    """What the meta page of this transaction says; None if there is none."""
    first = os.pread(file, 4096, 0)
    if len(first) < 4096:
        return None
    (page_bytes, *_) = _TREE.unpack_from(first, HEADER + _META.size)
    if not 256 <= page_bytes <= 65536:
        raise DamagedPages(f"a page has {page_bytes} bytes")
    for n in (0, 1):
        raw = os.pread(file, 4096, n * page_bytes)
        at = HEADER + _META.size
        if len(raw) < at + 2 * _TREE.size + _TAIL.size or _META.unpack_from(raw, HEADER)[0] != _MAGIC:
            continue
        trees = [_TREE.unpack_from(raw, at + i * _TREE.size) for i in (0, 1)]
        last_page, written_by = _TAIL.unpack_from(raw, at + 2 * _TREE.size)
        if written_by == transaction:
            return _Commit(page_bytes, tuple((tree[2], tree[-1]) for tree in trees), last_page)
    return None


class _Walk:
    """The pages that were seen."""

    def __init__(self, file: int, commit: _Commit) -> None:
        self._file, self._commit = file, commit
        self.live, self.free = set[int](), set[int]()

    def tree(self, root: int, depth: int, is_free_list: bool = False) -> None:
        if root == NO_PAGE:
            return
        if not 0 < depth <= MAX_DEPTH:
            raise DamagedPages(f"a tree has {depth} levels")
        level = [root]
        for left in reversed(range(depth)):
            level = [child for page in level for child in self._page(page, left == 0, is_free_list)]

    def _page(self, number: int, is_leaf: bool, is_free_list: bool) -> list[int]:
        """Check a page -> the pages below it."""
        self._enter(number)
        size = self._commit.page_bytes
        raw = os.pread(self._file, size, number * size)
        if len(raw) < size:
            raise DamagedPages(f"page {number} is behind the end of the file")
        own, _, flags, lower, upper = _HEADER.unpack_from(raw)
        if own != number or flags != (LEAF if is_leaf else BRANCH):
            raise DamagedPages(f"page {number} says that it is page {own}, of kind {flags}")
        n = (lower - HEADER) // 2
        if lower % 2 or not HEADER <= lower <= upper <= size or n < (1 if is_leaf else 2):
            raise DamagedPages(f"page {number} has its nodes from {lower} to {upper}")
        at = np.frombuffer(raw, "<u2", n, HEADER).astype(np.int64)
        if int(at.min()) < upper or int(at.max()) > size - NODE:
            raise DamagedPages(f"page {number} has a node outside of it")
        fields = np.frombuffer(raw, np.uint8)[at[:, None] + np.arange(NODE)].view("<u2").astype(np.int64)
        low, high, node_flags, key_bytes = fields.T
        if not is_leaf:
            if int((at + NODE + key_bytes).max()) > size:
                raise DamagedPages(f"page {number} has a key that is longer than the page")
            return (low | high << 16 | node_flags << 32).tolist()  # type: ignore[no-any-return]
        value_bytes = low | high << 16
        is_big = node_flags == BIG
        ends = at + NODE + key_bytes + np.where(is_big, 8, value_bytes)
        if bool((node_flags & ~BIG).any()) or int(ends.max()) > size or bool((key_bytes == 0).any()):
            raise DamagedPages(
                f"page {number} has a node that is longer than the page, or of an unknown kind"
            )
        starts = at + NODE + key_bytes
        for start, n_bytes in zip(starts[is_big].tolist(), value_bytes[is_big].tolist(), strict=True):
            (first,) = struct.unpack_from("<Q", raw, start)
            n_pages = (HEADER - 1 + n_bytes) // size + 1
            for page in (
                range(first, first + n_pages) if first + n_pages <= self._commit.last_page + 1 else [NO_PAGE]
            ):
                self._enter(page)
            if is_free_list:
                self._free(os.pread(self._file, n_bytes, first * size + HEADER), n_bytes)
        if is_free_list:
            for start, n_bytes in zip(starts[~is_big].tolist(), value_bytes[~is_big].tolist(), strict=True):
                self._free(raw[start : start + n_bytes], n_bytes)
        return []

    def _enter(self, number: int) -> None:
        if not 1 < number <= self._commit.last_page or number in self.live:
            raise DamagedPages(f"page {number} does not exist, or is referred to twice")
        self.live.add(number)

    def _free(self, raw: bytes, n_bytes: int) -> None:
        """A list of free pages: its length, then their numbers, descending."""
        (n,) = struct.unpack_from("<Q", raw) if len(raw) == n_bytes >= 8 else (NO_PAGE,)
        if 8 * (n + 1) > n_bytes:
            raise DamagedPages(f"a list of {n} free pages has {n_bytes} bytes")
        pages = np.frombuffer(raw, "<u8", n, 8)
        is_in_order = bool((pages[1:] < pages[:-1]).all())
        if n and (not is_in_order or int(pages[-1]) < 2 or int(pages[0]) > self._commit.last_page):
            raise DamagedPages("a list of free pages is out of order, or names pages that do not exist")
        self.free.update(pages.tolist())
