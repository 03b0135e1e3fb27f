"""How many replicas a user may ask for."""

from __future__ import annotations

import pytest

from blendserve.errors import InputError
from blendserve.workers.replicas import ReplicaCount


def test_a_number_is_always_so_many_and_two_are_bounds() -> None:
    assert ReplicaCount.parse("2").options(4) == {"num_replicas": 2}
    assert ReplicaCount.parse("1-4").options(8) == {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}
    }
    assert str(ReplicaCount.parse("1-4")) == "1 to 4"


@pytest.mark.parametrize("text", ["0", "-1", "0-2", "4-1", "two", "1-", "1.5", ""])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="give a number from 1 on"):
        ReplicaCount.parse(text)
