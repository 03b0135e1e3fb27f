"""How an encoder is fastest on this CPU and still right: measured once per machine and model, and kept.

fp32                     always right
bf16, torch attends      where the CPU multiplies bf16
bf16, kernels attend     the same with ops.attend
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.verify import cpu_status
from blendserve.models.loader import fast_dtype
from blendserve.paths import cache_folder
from blendserve.retrieve.bert import Bert
from blendserve.retrieve.bert_folder import BertFolder
from blendserve.retrieve.encoder import Window

VERSION = 1  # of what is measured
FORMS = ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))  # dtype, by kernels
TRIES = 3
WINDOWS, TOKENS = 8, 64  # a tenth of a second or less for each form
ALIKE = 0.99  # least cosine between a vector and fp32's; the bundled model's are above .999


def fastest(folder: BertFolder, fingerprint: str) -> Bert:
    """The encoder in its fastest form; fp32 where the CPU does not multiply bf16."""
    if fast_dtype() != torch.bfloat16:
        return Bert(folder, *FORMS[0])
    kernels = [cpu_status(level).reason for level in LEVELS.values()]
    about = repr((VERSION, fingerprint, torch.__version__, platform.node(), kernels))
    file = cache_folder() / "embedder" / f"{hashlib.blake2b(about.encode(), digest_size=12).hexdigest()}.json"
    try:
        return Bert(folder, *FORMS[json.loads(file.read_text())["form"]])
    except (OSError, ValueError, LookupError, TypeError):
        encoders = [Bert(folder, *form) for form in FORMS]
    seconds, alike = compare(encoders)
    best = min((n for n in range(len(FORMS)) if alike[n] >= ALIKE), key=lambda n: seconds[n])
    with suppress(OSError):  # a read-only home costs a fraction of a second a start
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"form": best, "seconds": seconds, "cosine": alike}))
    return encoders[best]


def compare(encoders: Sequence[Bert]) -> tuple[list[float], list[float]]:
    """Of each, over the same windows: least seconds, interleaved, and the least cosine of a vector and the first's."""
    seconds, vectors = [float("inf")] * len(encoders), [np.empty(0)] * len(encoders)
    windows = _sample(encoders[0])
    for _ in range(TRIES):
        for n, encoder in enumerate(encoders):
            start = time.perf_counter()
            found = encoder.encode(windows, of_question=False)
            seconds[n] = min(seconds[n], time.perf_counter() - start)
            vectors[n] = found / np.linalg.norm(found, axis=1, keepdims=True)
    return seconds, [float((unit * vectors[0]).sum(1).min()) for unit in vectors]


def _sample(encoder: Bert) -> list[Window]:
    """Token ids by chance: speed depends on no text."""
    rng = np.random.default_rng(0)
    size = (WINDOWS, min(TOKENS, encoder.max_tokens - encoder.overhead))
    return [Window("", ids) for ids in rng.integers(0, encoder.tokenizer.get_vocab_size(), size, np.int32)]
