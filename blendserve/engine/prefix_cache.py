"""Conversations: earlier turns stand in front of this turn's passages, and their KV is kept between turns.

    [ system | turn 1 | turn 2 | ... | this turn's opening | chunk 0 | chunk 1 | ... | question ]
      head: exact; computed once, then found                 blended behind it

What was retrieved for an earlier turn is not part of the head: it would fill the reader's context in a few turns. So a
head depends on nothing but its own tokens, its KV is exact, and the next turn's head begins with almost all of it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blendserve.blend.precompute import ChunkComputer
from blendserve.config import PromptConfig
from blendserve.core import ChunkKV, Passage, Prompt, TokenIds
from blendserve.engine.prompt import PASSAGES, QUESTION, PromptBuilder
from blendserve.engine.queued import Front
from blendserve.errors import InputError
from blendserve.models.adapter import Adapter

TURN = "<<<blendserve-turn-{}>>>"
_SENTINEL = re.compile(r"(<<<blendserve-[a-z0-9-]+>>>)")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message before the last question."""

    role: str  # system, user or assistant
    text: str


class ChatBuilder:
    """Lays out prompts that have earlier turns, or a system text of the client's own."""

    def __init__(self, prompts: PromptBuilder, tokenizer: Any, config: PromptConfig) -> None:
        self._prompts, self._tokenizer, self._config = prompts, tokenizer, config

    def build(self, turns: Sequence[Turn], question: str, passages: Sequence[Passage]) -> Prompt:
        """The prompt; without turns, the engine's own. Raises InputError for turns that the reader's template refuses.

        A system turn, which must be the first, takes the place of the configured one.
        """
        if not turns:
            return self._prompts.build(question, passages)
        head, _, suffix = self._template(turns).partition(PASSAGES)
        said = {TURN.format(i): turn.text for i, turn in enumerate(turns)}
        said[QUESTION] = " " + question.strip()
        chunks = tuple(self._prompts.chunk(p) for p in passages)
        return Prompt(self._ids(head, said), chunks, self._ids(suffix, said))

    def _template(self, turns: Sequence[Turn]) -> str:
        """The chat with sentinels in the place of texts."""
        places = [TURN.format(i) for i in range(len(turns))]
        messages = [{"role": t.role, "content": place} for t, place in zip(turns, places, strict=True)]
        if turns[0].role != "system":
            messages.insert(0, {"role": "system", "content": self._config.system})
        asked = f"{self._config.instruction}\n\n{PASSAGES}Question:{QUESTION}"
        messages.append({"role": "user", "content": asked})
        for attempt in (messages, _without_system(messages)):
            text = self._rendered(attempt)
            if _SENTINEL.findall(text) == [*places, PASSAGES, QUESTION]:
                return text
        roles = ", ".join(m["role"] for m in messages)
        raise InputError(
            f"the reader's chat template cannot hold these turns ({roles}): "
            "begin with at most one system message, then let user and assistant alternate"
        )

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        if not getattr(self._tokenizer, "chat_template", None):
            bos = self._tokenizer.bos_token or ""
            return bos + "".join(f"{m['role'].title()}: {m['content']}\n" for m in messages) + "Assistant:"
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        except TemplateError:
            return ""

    def _ids(self, template: str, said: dict[str, str]) -> TokenIds:
        """Template text with its control tokens; what people said, without any."""
        ids: list[int] = []
        for part in _SENTINEL.split(template):
            if part:
                literal = part in said
                ids += self._tokenizer(
                    said.get(part, part), add_special_tokens=False, split_special_tokens=literal
                )["input_ids"]
        return tuple(ids)


def _without_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """For templates without a system role: its text opens the first user message."""
    system, first, *rest = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *rest]


class Heads:
    """KV of conversations so far, the latest kept within a number of bytes. Used by the model's thread alone.

    Nothing of it is ever stored on disk: it depends on its order, and would crowd out what does not.
    """

    def __init__(self, adapter: Adapter, cap_bytes: int) -> None:
        self._adapter, self._cap = adapter, cap_bytes
        self._kept: OrderedDict[tuple[str, TokenIds], ChunkKV] = OrderedDict()

    def front(self, namespace: str, ids: TokenIds, base: TokenIds, base_kv: ChunkKV) -> Front:
        """The KV of a head: the longest beginning that is known, the rest computed behind it, and kept.

        base, base_kv: a beginning that everybody has. Only heads of the same namespace are looked at.
        """
        found, kv = _common(ids, base), base_kv
        for (owner, other), known in self._kept.items():
            if owner == namespace and (n := _common(ids, other)) > found:
                found, kv = n, known
        known = ChunkKV(kv.keys[:, :, :found], kv.values[:, :, :found])
        if found < len(ids):
            computer = ChunkComputer(self._adapter, ids[:found], known if found else None)
            new = computer.compute([ids[found:]])[0]
            known = ChunkKV(torch.cat([known.keys, new.keys], 2), torch.cat([known.values, new.values], 2))
        self._keep((namespace, ids), known)
        return Front(known, found)

    @property
    def n_bytes(self) -> int:
        """Of all that is kept."""
        return sum(kv.n_bytes for kv in self._kept.values())

    def _keep(self, key: tuple[str, TokenIds], kv: ChunkKV) -> None:
        """A copy of its own: a view would hold a longer head in memory."""
        if key not in self._kept:
            self._kept[key] = ChunkKV(kv.keys.clone(), kv.values.clone())
        self._kept.move_to_end(key)
        while self._kept and self.n_bytes > self._cap:
            self._kept.popitem(last=False)


def _common(a: TokenIds, b: TokenIds) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
