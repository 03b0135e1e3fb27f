"""What a client may choose of blending."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from blendserve.serve.schemas import BlendOptions


def test_a_client_gives_a_policy_parameters_and_a_correction_none() -> None:
    """Large moves of KV give numbers that are not finite, and a server then drops the stored chunks."""
    assert BlendOptions(policy="deviation[layers=1,2]", correction="ridge").policy == "deviation[1,2]"
    with pytest.raises(ValidationError):
        BlendOptions(correction="ridge[key_scale=1000]")
