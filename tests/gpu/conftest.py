"""Triton's kernels run in its interpreter here, on the CPU: decided when a kernel's module is first imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
