"""POST /tokenize and /detokenize: a prompt's tokens, and their text, as vLLM's routes of these names."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator

from blendserve.errors import InputError
from blendserve.serve.auth import LimitedTenantDep
from blendserve.serve.engine_client import ClientDep
from blendserve.serve.fields import MAX_ITEMS, MAX_TOOLS, Body, Ids, JsonObject, Name, Text
from blendserve.serve.messages import counted_prompt
from blendserve.serve.openai import ServedModel
from blendserve.serve.openai_schemas import ChatRequest, Message, Tool

router = APIRouter(tags=["OpenAI"])


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a chat that the model's template renders."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send `prompt` or `messages`")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: Name | None = None
    tokens: Ids


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, client: ClientDep, tenant: LimitedTenantDep) -> dict[str, Any]:
    """Return the tokens of a plain prompt. Raises InputError, PromptTooLong."""
    ServedModel.of(client, body.model)
    plain: Any = body.prompt
    if body.messages is not None:
        chat = ChatRequest.model_construct(
            messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
        )
        plain = chat.chat()
    prompt = await counted_prompt(client, tenant, plain)
    return {"count": len(prompt), "max_model_len": client.max_tokens, "tokens": list(prompt.ids)}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, client: ClientDep, tenant: LimitedTenantDep) -> dict[str, str]:
    """Return the text of tokens, special ones included."""
    ServedModel.of(client, body.model)
    if max(body.tokens) >= len(client.tokenizer):
        raise InputError(f"tokens: the tokenizer has no token {max(body.tokens)}", setting="tokens")
    return {"prompt": client.tokenizer.decode(body.tokens)}
