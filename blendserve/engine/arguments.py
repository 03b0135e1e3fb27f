"""Arguments of the public Python API: a wrong type or value is an InputError that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import shorten

from blendserve.config import BlendConfig, StoreConfig
from blendserve.core import Passage, TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import ConfigError, InputError
from blendserve.store.base import KVStore


def own_passages(passages: object, setting: str = "passages") -> tuple[Passage, ...]:
    """A caller's passages, texts among them. Raises InputError with the position of what is none."""
    if not isinstance(passages, Iterable) or isinstance(passages, str | Mapping):
        raise InputError(
            f"{setting} cannot be {_shown(passages)}: give a list of passages or texts", setting=setting
        )
    found = list[Passage]()
    for n, each in enumerate(passages):
        passage = Passage(each) if isinstance(each, str) else each
        if not isinstance(passage, Passage):
            message = f"{setting}[{n}] cannot be {_shown(each)}: give a Passage or a text"
            raise InputError(message, setting=setting)
        for text in (passage.text, passage.title):
            check_text(text, f"{setting}[{n}]")
        found.append(passage)
    return tuple(found)


def check_text(text: object, setting: str) -> str:
    """The text. Raises InputError for anything else, and for lone surrogates, which no tokenizer can read."""
    if not isinstance(text, str):
        raise InputError(f"{setting} cannot be {_shown(text)}: give a text", setting=setting)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(
            f"{setting} has a lone surrogate, which is not a character: remove it", setting=setting
        )
    return text


def check_count(value: object, setting: str) -> int:
    """A number of at least 1. Raises InputError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(
            f"{setting} cannot be {_shown(value)}: give a whole number from 1 on", setting=setting
        )
    return value


def check_shard(shard: object) -> tuple[int, int]:
    """(i, n): the i-th of n shares. Raises InputError."""
    if not (isinstance(shard, tuple) and [type(part) for part in shard] == [int, int]):
        raise InputError(
            f"shard cannot be {_shown(shard)}: give two numbers, such as (0, 2)", setting="shard"
        )
    i, n = shard
    if not 0 <= i < n:
        shares = f"count from 0/{n} to {n - 1}/{n}" if n > 0 else "there is at least one, 0/1"
        raise InputError(f"shard {i}/{n} does not exist: {shares}", setting="shard")
    return i, n


def chunks_within(passages: Iterable[Passage], prompts: PromptBuilder, limit: int) -> list[TokenIds]:
    """The chunks of passages. limit: tokens of a prompt. Raises InputError for a passage that fits no prompt."""
    room = max(0, limit - len(prompts.kv_context))
    found = list[TokenIds]()
    for passage in passages:
        if least := prompts.at_least([passage.title, passage.text], room):
            raise InputError(
                f"a passage of at least {least:,} tokens fits no prompt of this model, {_shown(passage.text)}: cut "
                f"it into passages of at most {room:,} tokens",
                setting="passages",
            )
        found.append(prompts.chunk(passage).ids)
    return found


def _shown(value: object) -> str:
    return shorten(repr(value), 60)


def check_near(blend: BlendConfig, store: KVStore, config: StoreConfig) -> None:
    """Raises ConfigError where near-duplicates are to be looked for in a store that never finds any."""
    if blend.near and not store.cap_bytes:
        raise ConfigError(
            f"setting 'blend.near' is of no use with a store of kind {config.kind!r}, which does not list the tokens of "
            "its chunks: leave it out, or store chunks on this machine, too (a folder as store.location, and "
            f"{config.location} as store.remote.location)",
            setting="blend.near",
        )
