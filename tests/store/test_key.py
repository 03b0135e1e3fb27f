"""A key tells apart all that the tensors depend on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.store.key import KEY_BYTES, TAG_BYTES, chunk_key, namespace_tag

BASE = {"fingerprint": "f", "kv_context": (1, 2), "ids": (3, 4), "dtype": "bfloat16", "namespace": ""}
ids = st.lists(st.integers(0, 200_000), max_size=6)


def key(**changes: object) -> bytes:
    return chunk_key(**{**BASE, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "g"},
        {"kv_context": (1,)},
        {"kv_context": (1, 2, 3), "ids": (4,)},  # the border between the two counts
        {"ids": (4, 3)},
        {"ids": ()},
        {"dtype": "float16"},
        {"fingerprint": "fb", "dtype": "float16"},
        {"namespace": "tenant"},
    ],
)
def test_any_change_gives_another_key(change: dict[str, object]) -> None:
    assert key(**change) != key()


@given(ids, ids, ids, ids)
def test_equal_keys_mean_equal_ids(
    behind: list[int], chunk: list[int], behind2: list[int], chunk2: list[int]
) -> None:
    alike = key(kv_context=behind, ids=chunk) == key(kv_context=behind2, ids=chunk2)
    assert alike == ((behind, chunk) == (behind2, chunk2))


def test_the_kind_of_sequence_does_not_matter() -> None:
    assert key(kv_context=[1, 2], ids=range(3, 5)) == key()


def test_a_key_is_stable() -> None:
    """A change here orphans every store: raise the number in key.py's `person` when it is meant."""
    assert key().hex() == "80383814a3e681599c02afec55495af4b21b3ec2a8ac78bf3dd27184"


def test_namespaces_share_no_part_of_a_key() -> None:
    one, other = key(namespace="a"), key(namespace="b")
    assert len(one) == len(other) == KEY_BYTES
    assert one[:TAG_BYTES] == namespace_tag("a") != other[:TAG_BYTES]
    assert one[TAG_BYTES:] != other[TAG_BYTES:]
