"""The key of a chunk's KV: a keyed hash of everything the tensors depend on, and of nothing else.

    key = tag(namespace)                                                                8 bytes
        + blake2b(model fingerprint, context ids, ids, dtype; keyed by the namespace)   20 bytes

No file path, passage id or position is part of it: equal text read by an equal model in an equal context has equal KV.
A tenant's namespace keys the hash, so that the same text under two namespaces has unrelated keys. The tag in front
identifies the namespace without naming it, and keeps a tenant's chunks together in an ordered store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

ChunkKey = bytes

TAG_BYTES = 8
DIGEST_BYTES = 20
KEY_BYTES = TAG_BYTES + DIGEST_BYTES


def chunk_key(
    fingerprint: str, kv_context: Sequence[int], ids: Sequence[int], dtype: str, namespace: str = ""
) -> ChunkKey:
    """The key of chunk `ids`, computed after the tokens `kv_context` in `dtype` by the model `fingerprint`."""
    secret = hashlib.blake2b(namespace.encode(), digest_size=32, person=b"blendserve.ns.1").digest()
    digest = hashlib.blake2b(key=secret, digest_size=DIGEST_BYTES, person=b"blendserve.kv.1")
    for field in (fingerprint.encode(), _bytes_of(kv_context), _bytes_of(ids), dtype.encode()):
        digest.update(len(field).to_bytes(8, "little"))  # no two lists of fields give the same bytes
        digest.update(field)
    return namespace_tag(namespace) + digest.digest()


def share_of(ids: Sequence[int], n: int) -> int:
    """The share, of n shares of a corpus, that a chunk belongs to: by its tokens alone, hence equal on every machine."""
    digest = hashlib.blake2b(_bytes_of(ids), digest_size=8, person=b"blendserve.sh.1").digest()
    return int.from_bytes(digest, "little") % n


def namespace_tag(namespace: str | None) -> bytes:
    """The prefix of every key of a namespace; empty for None, which stands for all namespaces."""
    if namespace is None:
        return b""
    return hashlib.blake2b(namespace.encode(), digest_size=TAG_BYTES, person=b"blendserve.tag.1").digest()


def _bytes_of(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i8").tobytes()
