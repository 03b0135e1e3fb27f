"""Response synthesizer that sends nodes to a blendserve server as `documents`, which are blended as chunks."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms import MockLLM
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

EXTRA = "x_blendserve"  # the block of a response that OpenAI's protocol has no field for
API_BASE = "http://127.0.0.1:8000/v1"


class BlendserveSynthesizer(BaseSynthesizer):
    """Answers a query from nodes by one request: each node is a document, in the order given.

    A node's text is what LlamaIndex shows to an LLM: its content with the metadata that is not excluded. The response's
    `metadata["x_blendserve"]` holds passages, report and timings; of a stream, once it has ended.

    model: name of the server's model.
    api_base, api_key: default: BLENDSERVE_BASE_URL, BLENDSERVE_API_KEY, else a server on this machine without keys.
    streaming: return a StreamingResponse or AsyncStreamingResponse.
    additional_kwargs: further arguments of `chat.completions.create`, such as max_tokens or extra_body.
    Requests raise the errors of the openai package.
    """

    def __init__(
        self,
        model: str,
        api_base: str | None = None,
        api_key: str | None = None,
        streaming: bool = False,
        timeout: float = 60.0,
        max_retries: int = 2,
        additional_kwargs: Mapping[str, Any] | None = None,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        # The base class reads an LLM's metadata; the model of the server answers, so this one is never asked.
        llm = MockLLM()
        super().__init__(llm, callback_manager, streaming=streaming, empty_response=empty_response)
        self.model = model
        self.additional_kwargs = dict(additional_kwargs or {})
        client: dict[str, Any] = {
            "base_url": api_base or os.environ.get("BLENDSERVE_BASE_URL", API_BASE),
            "api_key": api_key or os.environ.get("BLENDSERVE_API_KEY", "none"),
            "timeout": timeout,
            "max_retries": max_retries,
        }
        self._client, self._async_client = OpenAI(**client), AsyncOpenAI(**client)

    def _get_prompts(self) -> PromptDictType:
        """No prompts: the server renders its own."""
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        """No prompts: the server renders its own."""

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """The answer to a query from nodes."""
        extra: dict[str, Any] = {}
        response_kwargs |= {"documents": _documents(nodes), "extra": extra}
        return _with_extra(
            super().synthesize(query, nodes, additional_source_nodes, **response_kwargs), extra
        )

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """The answer to a query from nodes."""
        extra: dict[str, Any] = {}
        response_kwargs |= {"documents": _documents(nodes), "extra": extra}
        response = await super().asynthesize(query, nodes, additional_source_nodes, **response_kwargs)
        return _with_extra(response, extra)

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """The answer as text, or as a generator of its pieces."""
        request, extra = self._request(query_str, text_chunks, **response_kwargs)
        if self._streaming:
            return self._stream(request, extra)
        return _text(self._client.chat.completions.create(**request), extra)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """The answer as text, or as an asynchronous generator of its pieces."""
        request, extra = self._request(query_str, text_chunks, **response_kwargs)
        if self._streaming:
            return self._astream(request, extra)
        return _text(await self._async_client.chat.completions.create(**request), extra)

    def _request(
        self,
        query: str,
        texts: Sequence[str],
        documents: Sequence[Mapping[str, str]] | None = None,
        extra: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of a chat completion, and the dictionary that the block of its response goes into."""
        request = {**self.additional_kwargs, **kwargs}
        documents = [{"text": text} for text in texts] if documents is None else documents
        request["extra_body"] = {**(request.get("extra_body") or {}), "documents": documents}
        messages = [{"role": "user", "content": query}]
        return {"model": self.model, "messages": messages, **request}, {} if extra is None else extra

    def _stream(self, request: dict[str, Any], extra: dict[str, Any]) -> Generator[str, None, None]:
        with self._client.chat.completions.create(**request, stream=True) as chunks:
            for chunk in chunks:
                if piece := _piece(chunk, extra):
                    yield piece

    async def _astream(self, request: dict[str, Any], extra: dict[str, Any]) -> AsyncGenerator[str, None]:
        async with await self._async_client.chat.completions.create(**request, stream=True) as chunks:
            async for chunk in chunks:
                if piece := _piece(chunk, extra):
                    yield piece


def _documents(nodes: Sequence[NodeWithScore]) -> list[dict[str, str]]:
    return [{"id": n.node.node_id, "text": n.node.get_content(metadata_mode=MetadataMode.LLM)} for n in nodes]


def _text(completion: ChatCompletion, extra: dict[str, Any]) -> str:
    extra.update(getattr(completion, EXTRA, None) or {})
    return completion.choices[0].message.content or ""


def _piece(chunk: ChatCompletionChunk, extra: dict[str, Any]) -> str:
    extra.update(getattr(chunk, EXTRA, None) or {})
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""


def _with_extra(response: RESPONSE_TYPE, extra: dict[str, Any]) -> RESPONSE_TYPE:
    response.metadata = {**(response.metadata or {}), EXTRA: extra}
    return response
