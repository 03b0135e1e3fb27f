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
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

BRANCH, LEAF = 1, 2  # flags of a page
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
        walk.check_extents()
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
    """The pages that were seen: of trees, of large values, and free ones. No two of them may be the same."""

    def __init__(self, file: int, commit: _Commit) -> None:
        self._file = file
        self._commit = commit
        self._tree = set[int]()
        self._extents = [np.empty((0, 2), np.uint64)]  # first page and number of pages

    def tree(self, root: int, depth: int, is_free_list: bool = False) -> None:
        if root == NO_PAGE:
            return
        if not 0 < depth <= MAX_DEPTH:
            raise DamagedPages(f"a tree has {depth} levels")
        level = [root]
        for left in reversed(range(depth)):
            level = [child for page in level for child in self._page(page, left == 0, is_free_list)]

    def check_extents(self) -> None:
        own = np.array([(page, 1) for page in self._tree], np.uint64).reshape(-1, 2)
        extents = np.concatenate([*self._extents, own])
        first, n = extents[np.argsort(extents[:, 0], kind="stable")].T
        last = first + n - np.uint64(1)
        is_outside = len(first) and (first[0] < 2 or (first > self._commit.last_page).any())
        if is_outside or (last > self._commit.last_page).any() or (first[1:] <= last[:-1]).any():
            raise DamagedPages("a page is referred to twice, or does not exist")

    def _page(self, number: int, is_leaf: bool, is_free_list: bool) -> list[int]:
        """Check a page -> the pages below it."""
        if not 1 < number <= self._commit.last_page or number in self._tree:
            raise DamagedPages(f"page {number} does not exist, or is referred to twice")
        self._tree.add(number)
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
        low, high, node_flags, key_bytes = _numbers(raw, at, "<u2", 4).astype(np.int64).T
        values = at + NODE + key_bytes
        if not is_leaf:
            if int(values.max()) > size:
                raise DamagedPages(f"page {number} has a key that is longer than the page")
            children: list[int] = (low | high << 16 | node_flags << 32).tolist()
            return children
        value_bytes = low | high << 16
        is_big = node_flags == BIG
        ends = values + np.where(is_big, 8, value_bytes)
        if bool((node_flags & ~BIG).any()) or int(ends.max()) > size or bool((key_bytes == 0).any()):
            raise DamagedPages(
                f"page {number} has a node that is longer than the page, or of an unknown kind"
            )
        self._values(raw, values[is_big], value_bytes[is_big], is_free_list)
        if is_free_list:
            for start, n_bytes in zip(values[~is_big].tolist(), value_bytes[~is_big].tolist(), strict=True):
                self._free(raw[start : start + n_bytes], n_bytes)
        return []

    def _values(self, raw: bytes, at: Numbers, n_bytes: Numbers, is_free_list: bool) -> None:
        """Large values, of which a leaf has the first page."""
        size = self._commit.page_bytes
        first = _numbers(raw, at, "<u8", 1)[:, 0]
        n_pages = ((HEADER - 1 + n_bytes) // size + 1).astype(np.uint64)
        if (first > self._commit.last_page).any():
            raise DamagedPages("a large value lies on pages that do not exist")
        self._extents.append(np.stack([first, n_pages], axis=1))
        if is_free_list:
            for page, length in zip(first.tolist(), n_bytes.tolist(), strict=True):
                self._free(os.pread(self._file, length, page * size + HEADER), length)

    def _free(self, raw: bytes, n_bytes: int) -> None:
        """A list of free pages: its length, then their numbers, descending."""
        (n,) = struct.unpack_from("<Q", raw) if len(raw) == n_bytes >= 8 else (NO_PAGE,)
        if 8 * (n + 1) > n_bytes:
            raise DamagedPages(f"a list of {n} free pages has {n_bytes} bytes")
        pages = np.frombuffer(raw, "<u8", n, 8)
        if (pages[1:] >= pages[:-1]).any():
            raise DamagedPages("a list of free pages is out of order")
        self._extents.append(np.stack([pages, np.ones_like(pages)], axis=1))


def _numbers(raw: bytes, at: Numbers, kind: str, n: int) -> Numbers:
    """n numbers from each of these places on, [P, n]."""
    n_bytes = n * np.dtype(kind).itemsize
    found: Numbers = np.frombuffer(raw, np.uint8)[at[:, None] + np.arange(n_bytes)].view(kind)
    return found
