"""Generator that sends documents to a blendserve server beside the query; the server blends them as chunks."""

import os
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.dataclasses import ComponentInfo, StreamingCallbackT, StreamingChunk, select_streaming_callback
from haystack.utils import Secret, deserialize_callable, deserialize_secrets_inplace, serialize_callable
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk

EXTRA = "x_blendserve"  # the block of a response that OpenAI's protocol has no field for
API_BASE_URL = "http://127.0.0.1:8000/v1"


@component
class BlendserveGenerator:
    """Answers a query from documents by one request; documents are blended in the order given.

    The title of a document is its `meta["title"]`. Without `documents`, the server retrieves from its own collections;
    an empty list asks without documents.
    """

    def __init__(
        self,
        model: str,
        api_base_url: str | None = None,
        api_key: Secret = Secret.from_env_var("BLENDSERVE_API_KEY", strict=False),  # noqa: B008  immutable
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
    ) -> None:
        """
        :param model: Name of the server's model.
        :param api_base_url: Default: the variable BLENDSERVE_BASE_URL, else port 8000 of this machine.
        :param api_key: Key of the server.
        :param streaming_callback: Called with each StreamingChunk.
        :param generation_kwargs: Further arguments of `chat.completions.create`, such as max_tokens or extra_body.
        :param timeout: Seconds that the server may stay silent.
        :param max_retries: Number of retries after connection errors, 429 and 5xx.
        """
        self.model = model
        self.api_base_url = api_base_url
        self.api_key = api_key
        self.streaming_callback = streaming_callback
        self.generation_kwargs = generation_kwargs or {}
        self.timeout = timeout
        self.max_retries = max_retries
        self.client: OpenAI | None = None
        self.async_client: AsyncOpenAI | None = None

    def warm_up(self) -> None:
        """Create the synchronous client."""
        self.client = self.client or OpenAI(**self._client_kwargs())

    async def warm_up_async(self) -> None:
        """Create the asynchronous client, on the event loop that uses it."""
        self.async_client = self.async_client or AsyncOpenAI(**self._client_kwargs())

    def close(self) -> None:
        """Close the synchronous client."""
        if self.client:
            self.client.close()
        self.client = None

    async def close_async(self) -> None:
        """Close the asynchronous client."""
        if self.async_client:
            await self.async_client.close()
        self.async_client = None

    def to_dict(self) -> dict[str, Any]:
        """Serialise this component."""
        callback = serialize_callable(self.streaming_callback) if self.streaming_callback else None
        made: dict[str, Any] = default_to_dict(
            self,
            model=self.model,
            api_base_url=self.api_base_url,
            api_key=self.api_key.to_dict(),
            streaming_callback=callback,
            generation_kwargs=self.generation_kwargs,
            timeout=self.timeout,
            max_retries=self.max_retries,
        )
        return made

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "BlendserveGenerator":
        """Make this component from what `to_dict` returned."""
        parameters = data["init_parameters"]
        deserialize_secrets_inplace(parameters, ["api_key"])
        if parameters.get("streaming_callback"):
            parameters["streaming_callback"] = deserialize_callable(parameters["streaming_callback"])
        made: BlendserveGenerator = default_from_dict(cls, data)
        return made

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    def run(
        self,
        query: str,
        documents: list[Document] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """
        :param query: The question.
        :param documents: Documents to answer from.
        :param streaming_callback: In place of the one of the constructor.
        :param generation_kwargs: Added to those of the constructor, key by key.
        :returns: `replies`, a list of one text, and `meta`, a list of one dictionary with model, finish_reason, usage
            and x_blendserve (passages, report, timings).
        """
        self.warm_up()
        assert self.client
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=False
        )
        reply = _Reply(ComponentInfo.from_component(self))
        with self.client.chat.completions.create(
            **self._request(query, documents, generation_kwargs)
        ) as stream:
            for chunk in stream:
                if (piece := reply.add(chunk)) and callback:
                    callback(piece)
        return reply.result()

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    async def run_async(
        self,
        query: str,
        documents: list[Document] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """`run`, asynchronously; the callback may be a coroutine function."""
        await self.warm_up_async()
        assert self.async_client
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=True)
        reply = _Reply(ComponentInfo.from_component(self))
        request = self._request(query, documents, generation_kwargs)
        async with await self.async_client.chat.completions.create(**request) as stream:
            async for chunk in stream:
                if (piece := reply.add(chunk)) and callback and (waiting := callback(piece)):
                    await waiting
        return reply.result()

    def _client_kwargs(self) -> dict[str, Any]:
        return {
            "base_url": self.api_base_url or os.environ.get("BLENDSERVE_BASE_URL", API_BASE_URL),
            "api_key": self.api_key.resolve_value() or "none",
            "timeout": self.timeout,
            "max_retries": self.max_retries,
        }

    def _request(
        self, query: str, documents: list[Document] | None, generation_kwargs: dict[str, Any] | None
    ) -> dict[str, Any]:
        request = {**self.generation_kwargs, **(generation_kwargs or {})}
        if documents is not None:
            sent = [_document(document) for document in documents]
            request["extra_body"] = {**(request.get("extra_body") or {}), "documents": sent}
        messages = [{"role": "user", "content": query}]
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": messages, **request, **streamed}


def _document(document: Document) -> dict[str, str]:
    if document.content is None:
        raise ValueError(f"document {document.id} has no text: give the generator documents with content")
    title = document.meta.get("title")
    return {"id": document.id, "title": title if isinstance(title, str) else "", "text": document.content}


class _Reply:
    """What the chunks of one response add up to."""

    def __init__(self, info: ComponentInfo) -> None:
        self._info, self._pieces = info, list[str]()
        self._meta: dict[str, Any] = {"index": 0, EXTRA: {}}

    def add(self, chunk: ChatCompletionChunk) -> StreamingChunk | None:
        """Count a chunk in -> what a callback is called with, None for a chunk without text."""
        self._meta["model"] = chunk.model
        self._meta[EXTRA].update(getattr(chunk, EXTRA, None) or {})
        if chunk.usage:
            self._meta["usage"] = chunk.usage.model_dump()
        if not chunk.choices:
            return None
        self._meta["finish_reason"] = chunk.choices[0].finish_reason
        if not (text := chunk.choices[0].delta.content):
            return None
        self._pieces.append(text)
        meta = {"model": chunk.model}
        start = len(self._pieces) == 1
        return StreamingChunk(text, meta=meta, component_info=self._info, index=0, start=start)

    def result(self) -> dict[str, Any]:
        """The output of the component."""
        return {"replies": ["".join(self._pieces)], "meta": [self._meta]}
