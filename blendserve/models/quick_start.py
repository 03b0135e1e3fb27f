"""A reader without transformers, whose import takes longer than all else of a start: for models proven to be the same.

The first time a folder is loaded, transformers does it. Where its model and tokenizer are plain (plain_llama.py,
plain_tokenizer.py), ours are made from the same files and compared, layers to the bit and texts; what the files do not
say is kept. From then on ours serve, for as long as files, versions and this code are the same. transformers' own model
is loaded behind them when somebody asks for it: as a baseline, as the oracle, or for its own forward.

The bundled model needs no first time: the test suite makes the same comparison on the same file (test_gguf.py), so the
loader stores the result as soon as it has converted the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from blendserve import __version__
from blendserve.models import plain_llama, plain_tokenizer
from blendserve.models.adapter import Adapter
from blendserve.models.forward import append
from blendserve.models.kv_cache import KVCache
from blendserve.models.plain_llama import PlainConfig, PlainLlama, Weights, is_plain_llama
from blendserve.models.plain_tokenizer import PlainTokenizer, about
from blendserve.paths import cache_folder

log = logging.getLogger(__name__)

WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"
ABOUT, TOKENIZER = "about.json", "tokenizer.json"
ROWS = 16  # tokens of which everything is compared
TEXTS = ("The cat sat on 12 mats.\n\n", " na\u00efve \u6f22\u5b57 \U0001f642\t x", "")
CHATS = (
    ("system", "user"),
    ("user",),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user"),
)


class Quick(NamedTuple):
    """A reader's parts."""

    model: PlainLlama
    tokenizer: PlainTokenizer
    fingerprint: str | None  # that it must have; None = not known
    end_tokens: frozenset[int]


def recall(folder: Path, dtype: torch.dtype) -> Quick | None:
    """The folder's reader, if it is known to be plain; None for any other, and where anything is damaged."""
    kept = _kept(folder, dtype)
    try:
        known = json.loads((kept / ABOUT).read_text("utf-8"))
        model = PlainLlama(PlainConfig(**known["config"]), _weights(folder, dtype))
        tokenizer = PlainTokenizer(Tokenizer.from_file(str(kept / TOKENIZER)), known["tokenizer"])
        return Quick(model, tokenizer, known["fingerprint"], frozenset(known["end_tokens"]))
    except Exception as error:  # of JSON, safetensors or tokenizers: transformers will say what is wrong
        log.debug("no quick start: %s", error)
        return None


def keep(
    folder: Path, adapter: Adapter, tokenizer: Any, fingerprint: str, end_tokens: frozenset[int]
) -> None:
    """Compare a reader that transformers has loaded with ours, and keep what is needed where they are equal."""
    try:
        _keep(folder, adapter, tokenizer, fingerprint, end_tokens)
    except Exception as error:  # whatever the files hold: it is loaded as it was this time
        log.debug("no quick start: %s", error)


def _keep(
    folder: Path, adapter: Adapter, tokenizer: Any, fingerprint: str, end_tokens: frozenset[int]
) -> None:
    config: dict[str, Any] = json.loads(json.dumps(_config_of(adapter.model), default=str))
    if not is_plain_llama(config):
        return
    model = PlainLlama(PlainConfig(**config), _weights(folder, adapter.dtype))
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = False
    ours = PlainTokenizer(backend, about(tokenizer))
    if not (_same_steps(Adapter(model), adapter) and same_texts(ours, tokenizer)):
        return
    store(folder, adapter.dtype, config, ours, end_tokens, fingerprint)


def store(
    folder: Path,
    dtype: torch.dtype,
    config: dict[str, Any],
    tokenizer: PlainTokenizer,
    end_tokens: frozenset[int],
    fingerprint: str | None = None,
) -> None:
    """Write what `recall` reads, for a folder whose model and tokenizer are proven to be plain."""
    kept = _kept(folder, dtype)
    known = {
        "config": config,
        "tokenizer": tokenizer.about,
        "fingerprint": fingerprint,
        "end_tokens": sorted(end_tokens),
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=kept.parent))
    try:
        tokenizer.backend_tokenizer.save(str(scratch / TOKENIZER))
        (scratch / ABOUT).write_text(json.dumps(known), "utf-8")
        shutil.rmtree(kept, ignore_errors=True)
        with suppress(OSError):  # somebody else was first
            scratch.rename(kept)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@torch.inference_mode()
def _same_steps(ours: Adapter, theirs: Adapter) -> bool:
    """Whether KV of every layer, logits and angles are equal to the bit."""
    one, other = _computed(ours), _computed(theirs)
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def _computed(adapter: Adapter) -> list[Tensor]:
    ids = torch.randint(adapter.vocab_size, (ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = KVCache(adapter, ROWS)
    logits = append(adapter, cache, 0, ids)
    ropes = adapter.rope(torch.arange(0, adapter.context_limit, 13))
    return [logits, cache.keys, cache.values, *(part for rope in ropes for part in (rope.cos, rope.sin))]


def same_texts(ours: PlainTokenizer, theirs: Any) -> bool:
    special = "".join(map(str, ours.about["special_tokens"].values()))
    for text in (*TEXTS, special, f"a {special} b"):
        for options in ({"add_special_tokens": True}, {"add_special_tokens": False}):
            for literal in (False, True):
                ids = ours(text, **options, split_special_tokens=literal)["input_ids"]
                if ids != theirs(text, **options, split_special_tokens=literal)["input_ids"]:
                    return False
                for skip in (False, True):
                    given = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
                    if ours.decode(ids, **given) != theirs.decode(ids, **given):
                        return False
    same = ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    return same and all(_chat(ours, roles) == _chat(theirs, roles) for roles in CHATS)


def _chat(tokenizer: Any, roles: tuple[str, ...]) -> str | None:
    """None where the template refuses it."""
    if not tokenizer.chat_template:
        return None
    from jinja2 import TemplateError  # an optional package, which only chat templates need

    messages = [{"role": role, "content": f" {role} {n}\n"} for n, role in enumerate(roles)]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        return None


def _weights(folder: Path, dtype: torch.dtype) -> Weights:
    """Every tensor of the folder, mapped where it is of this dtype already."""
    names = {WEIGHTS}
    if not (folder / WEIGHTS).is_file():
        names = set(json.loads((folder / SHARDS).read_text())["weight_map"].values())
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for file in sorted(names)
        for name, tensor in load_file(folder / file).items()
    }


def _config_of(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.config.to_dict()
    return found


def _kept(folder: Path, dtype: torch.dtype) -> Path:
    """Where it is kept: a folder for each state of the model's files, dtype, version and of this code."""
    files = [
        (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()) if p.is_file()
    ]
    sources = [
        Path(str(part)).read_bytes() for part in (__file__, plain_llama.__file__, plain_tokenizer.__file__)
    ]
    about = (
        str(folder.resolve()),
        files,
        str(dtype),
        __version__,
        torch.__version__,
        version("transformers"),
    )
    digest = hashlib.blake2b(b"\0".join([repr(about).encode(), *sources]), digest_size=12)
    return cache_folder() / "starts" / digest.hexdigest()
