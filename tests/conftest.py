"""Nothing here goes online; a run's examples are the same every time.

`pytest --hypothesis-profile=search` looks for new ones.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["TRITON_INTERPRET"] = "1"  # kernels on the CPU: read when triton is first imported, by whomever

settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("suite"), derandomize=False, max_examples=1000)
settings.load_profile("suite")
