"""Fingerprints are part of every chunk's key: a change would make the KV that users have stored useless.

fingerprints.json was written before the types that came later were added, with weights that no random generator makes.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from blendserve.models.adapter import Adapter
from blendserve.models.loader import fingerprint
from tests.support.models import TINY

STORED = json.loads(Path(__file__).with_name("fingerprints.json").read_text("utf-8"))
pytestmark = pytest.mark.skipif(
    version("transformers") != STORED["transformers"],
    reason="a configuration's defaults, which are part of a fingerprint, differ by version of transformers",
)


@pytest.mark.parametrize("name", STORED["models"])
def test_fingerprint_and_bytes_of_a_token_stay(name: str) -> None:
    model: Any = tf.AutoModelForCausalLM.from_config(TINY[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for i, weights in enumerate(model.parameters()):
            weights.copy_(((torch.arange(weights.numel()) * (i + 7)) % 251 - 125).view(weights.shape) / 1000)
    found = {"fingerprint": fingerprint(model), "kv_bytes_per_token": Adapter(model).kv_bytes_per_token}
    assert found == STORED["models"][name]
