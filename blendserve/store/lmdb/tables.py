"""Tables of codecs in an LMDB map.

"t" + hash -> the tables
"p" + hash -> what is known of them | xxh3-64 with the hash 8      store/tables.py has the bytes of both
"""

from __future__ import annotations

from blendserve.store.lmdb.ledger import Txn, opened, sealed, starting
from blendserve.store.tables import TablesInfo, checked

TABLES, ABOUT = b"t", b"p"


def infos(txn: Txn) -> list[TablesInfo]:
    """What tables there are; a damaged record about some is passed over: they can still be read by their hash."""
    found = []
    for name, raw in starting(txn, ABOUT):
        body = opened(name[1:], raw)
        if body is not None:
            found.append(TablesInfo.from_bytes(name[1:], body))
    return found


def read(txn: Txn, hash: bytes) -> bytes | None:
    """Raises Undecodable when they are damaged."""
    raw = txn.get(TABLES + hash)
    return None if raw is None else checked(hash, raw)


def write(txn: Txn, info: TablesInfo, raw: bytes) -> None:
    """In place of what was there under this hash."""
    txn.put(TABLES + info.hash, raw)
    txn.put(ABOUT + info.hash, sealed(info.hash, info.to_bytes()))


def drop(txn: Txn, hash: bytes) -> bool:
    """Whether there was anything to drop."""
    there = [txn.delete(name + hash) for name in (TABLES, ABOUT)]
    return any(there)


def hashes(txn: Txn) -> list[bytes]:
    """Of every record of tables or about them."""
    return sorted({name[1:] for prefix in (TABLES, ABOUT) for name, _ in starting(txn, prefix)})


def problem(txn: Txn, hash: bytes) -> str:
    """What is wrong with some tables, "" when nothing is. Raises Undecodable when they are damaged."""
    about = txn.get(ABOUT + hash)
    if about is None or opened(hash, about) is None:
        return "what they are for is missing or damaged"
    raw = read(txn, hash)
    if raw is None:
        return "they are missing"
    said = TablesInfo.from_bytes(hash, opened(hash, about) or b"").n_bytes
    return "" if said == len(raw) else f"they have {len(raw)} bytes, their record says {said}"
