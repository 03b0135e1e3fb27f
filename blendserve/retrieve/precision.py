"""How an encoder is fastest on this CPU and still right: measured once per machine and model, and kept.

fp32 is always right. Where the CPU multiplies bf16, linear layers run over packed weights or over those of the file, and
attention by kernels or by torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.race import measure
from blendserve.kernels.verify import cpu_status
from blendserve.models.loader import fast_dtype
from blendserve.paths import cache_folder
from blendserve.retrieve.bert import NO_PACKING, Bert
from blendserve.retrieve.bert_folder import BertFolder
from blendserve.retrieve.encoder import Window

VERSION = 2  # of what is measured
WINDOWS, TOKENS = 8, 120  # of a sample; a tenth of a second for each form
ALIKE = 0.99  # least cosine between a vector and fp32's; the bundled model's are above .999


class Form(NamedTuple):
    """What Bert is made with."""

    dtype: torch.dtype
    by_kernels: bool
    packed: bool = False


PLAIN = Form(torch.float32, by_kernels=False)
FORMS = {  # by the name that is kept, in the order in which they serve where nothing could be measured
    "bf16, packed, kernels": Form(torch.bfloat16, by_kernels=True, packed=True),
    "bf16, kernels": Form(torch.bfloat16, by_kernels=True),
    "bf16, packed": Form(torch.bfloat16, by_kernels=False, packed=True),
    "bf16": Form(torch.bfloat16, by_kernels=False),
    "fp32": PLAIN,
}
_unmeasured: dict[Path, str] = {}  # forms of this process while the machine is too busy to measure


def fastest(folder: BertFolder, fingerprint: str) -> Bert:
    """The encoder in its fastest form; fp32 where the CPU does not multiply bf16."""
    if fast_dtype() != torch.bfloat16:
        return Bert(folder, *PLAIN)
    # Only what the forms below can run: asking for the status of a level compiles it.
    kernels = [cpu_status(level).reason for level in LEVELS.values() if level.dtype == "bfloat16"]
    about = repr((VERSION, fingerprint, torch.__version__, platform.node(), kernels))
    file = cache_folder() / "embedder" / f"{hashlib.blake2b(about.encode(), digest_size=12).hexdigest()}.json"
    try:
        return Bert(folder, *FORMS[_unmeasured.get(file) or json.loads(file.read_text())["form"]])
    except (OSError, ValueError, LookupError, TypeError, *NO_PACKING):
        encoders = available_forms(folder)
    seconds, alike = compare(encoders)
    able = [name for name in encoders if alike[name] >= ALIKE]
    best = min(able, key=lambda name: seconds[name]) if seconds else able[0]
    if seconds:
        with suppress(OSError):  # a read-only home costs a fraction of a second a start
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"form": best, "seconds": seconds, "cosine": alike}))
    else:
        _unmeasured[file] = best
    return encoders[best]


def compare(encoders: Mapping[str, Bert]) -> tuple[dict[str, float], dict[str, float]]:
    """Of each, over the same windows: least seconds, and the least cosine of a vector and fp32's.

    No seconds where the machine was too busy to tell (kernels/race.py).
    """
    windows = _sample(encoders["fp32"])

    def units(encoder: Bert) -> np.ndarray:
        found = encoder.encode(windows, of_question=False)
        unit: np.ndarray = found / np.linalg.norm(found, axis=1, keepdims=True)
        return unit

    wanted = units(encoders["fp32"])
    alike = {name: float((units(encoder) * wanted).sum(1).min()) for name, encoder in encoders.items()}
    times = measure({name: [partial(units, encoder)] for name, encoder in encoders.items()}, ours=())
    return {name: min(took) for name, took in (times or {}).items()}, alike


def available_forms(folder: BertFolder) -> dict[str, Bert]:
    """Every form that can be had here, in order."""
    found = {}
    for name, form in FORMS.items():
        with suppress(*(NO_PACKING if form.packed else ())):
            found[name] = Bert(folder, *form)
    return found


def _sample(encoder: Bert) -> list[Window]:
    """Token ids by chance: speed depends on no text."""
    rng = np.random.default_rng(0)
    size = (WINDOWS, min(TOKENS, encoder.max_tokens - encoder.overhead))
    return [Window("", ids) for ids in rng.integers(0, encoder.tokenizer.get_vocab_size(), size, np.int32)]
