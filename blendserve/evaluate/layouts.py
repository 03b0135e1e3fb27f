"""How clients lay out a question and its passages: the messages of plain prompts, in words of the settings.

langchain       LangChain's `create_stuff_documents_chain`: passages in the system message, then the question
question_first  one message: the question, then the passages
tool            an agent: the question, a call of a search tool, the passages as its result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blendserve.config import PromptConfig
from blendserve.engine.chat import Chat

Messages = tuple[Mapping[str, Any], ...]

SEPARATOR = "\n\n"  # LangChain's, and that of most others
_CALL = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": {}}}


def client_chat(layout: str, question: str, texts: Sequence[str], config: PromptConfig) -> Chat:
    """What a client sends."""
    return Chat(_LAYOUTS[layout](question, SEPARATOR.join(texts), config))


def _langchain(question: str, context: str, config: PromptConfig) -> Messages:
    return _said("system", f"{config.system} {config.instruction}\n\n{context}"), _said("user", question)


def _question_first(question: str, context: str, config: PromptConfig) -> Messages:
    asked = f"{config.instruction}\n\nQuestion: {question}\n\nPassages:\n\n{context}"
    return _said("system", config.system), _said("user", asked)


def _tool(question: str, context: str, config: PromptConfig) -> Messages:
    return (
        _said("system", f"{config.system} {config.instruction}"),
        _said("user", question),
        {**_said("assistant", ""), "tool_calls": [_CALL]},
        {**_said("tool", context), "tool_call_id": _CALL["id"], "name": "search"},
    )


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


_LAYOUTS: Mapping[str, Callable[[str, str, PromptConfig], Messages]] = {
    "langchain": _langchain,
    "question_first": _question_first,
    "tool": _tool,
}
