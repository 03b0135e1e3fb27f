"""Chat model of a blendserve server: OpenAI's protocol plus `documents`, which the server blends as chunks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import openai
from langchain_core.documents import Document
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.utils import from_env, secret_from_env
from langchain_openai import ChatOpenAI
from pydantic import Field, InstanceOf, SecretStr

EXTRA = "x_blendserve"  # the block of a request and of a response that OpenAI's protocol has no field for
BASE_URL = "http://127.0.0.1:8000/v1"

DocumentLike = Document | Mapping[str, Any]


def to_request(documents: Sequence[DocumentLike]) -> list[dict[str, Any]]:
    """Documents as the server's `documents` field: text, and title and id where they are set.

    The title of a LangChain document is its metadata's `title`. Dictionaries are sent as they are.
    """
    return [_from_document(d) if isinstance(d, Document) else dict(d) for d in documents]


def _from_document(document: Document) -> dict[str, Any]:
    title = document.metadata.get("title")
    named = {"title": title if isinstance(title, str) else "", "id": document.id}
    return {"text": document.page_content, **{name: value for name, value in named.items() if value}}


class ChatBlendserve(ChatOpenAI):
    """ChatOpenAI for a blendserve server.

    `documents` are blended in the order given; the last user message is the question. Give them to the constructor, to
    `invoke`, `stream`, `batch` and their async versions, or to `bind`; a call's documents replace the constructor's.
    Without any, the server retrieves from its own collections; `documents=[]` asks without documents.

    `response_metadata["x_blendserve"]` of an answer holds its passages, report and timings. `extra_body` takes the
    server's own options: `extra_body={"x_blendserve": {"method": "full"}}`.
    """

    model_name: str = Field(default="", alias="model", min_length=1, validate_default=True)  # required
    openai_api_base: str | None = Field(
        default_factory=from_env("BLENDSERVE_BASE_URL", default=BASE_URL), alias="base_url"
    )
    openai_api_key: SecretStr | Callable[[], str] | Callable[[], Awaitable[str]] | None = Field(
        default_factory=secret_from_env("BLENDSERVE_API_KEY", default="none"), alias="api_key"
    )
    stream_usage: bool | None = True
    use_responses_api: bool | None = False
    documents: Sequence[InstanceOf[Document] | Mapping[str, Any]] | None = None

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """LangChain loads serialised models of the packages that it lists, which this one is not."""
        return False

    @property
    def _llm_type(self) -> str:
        return "blendserve-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "blendserve"
        return params

    @property
    def _default_params(self) -> dict[str, Any]:
        """With the documents: they are part of what a cached answer is found by."""
        given = {} if self.documents is None else {"documents": self.documents}
        return {**super()._default_params, **given}

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        if (documents := payload.pop("documents", None)) is not None:
            body = {"documents": to_request(documents)}
            payload["extra_body"] = {**(payload.get("extra_body") or {}), **body}
        return payload

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        extra = response.get(EXTRA) if isinstance(response, dict) else getattr(response, EXTRA, None)
        for generation in result.generations if extra else ():
            generation.message.response_metadata[EXTRA] = extra
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        """Passages come with the first chunk, report and timings with the last: LangChain merges them."""
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if made and (extra := chunk.get(EXTRA)):
            made.message.response_metadata[EXTRA] = extra
        return made
