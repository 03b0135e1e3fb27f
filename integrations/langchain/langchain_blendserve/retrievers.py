"""Retriever over the collections of a blendserve server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.utils import from_env, secret_from_env
from pydantic import Field, SecretStr

from langchain_blendserve.chat_models import BASE_URL


class BlendserveRetriever(BaseRetriever):
    """Searches the collections of a blendserve server -> documents with id, and title and score as metadata.

    Raises httpx.HTTPStatusError with the server's message.
    """

    base_url: str = Field(default_factory=from_env("BLENDSERVE_BASE_URL", default=BASE_URL))
    api_key: SecretStr = Field(default_factory=secret_from_env("BLENDSERVE_API_KEY", default="none"))
    k: int = 4
    collections: list[str] | None = None  # None: all that the key may read
    timeout_s: float = 60.0

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        with httpx.Client(timeout=self.timeout_s) as client:
            return _documents(client.post(**self._request(query, k)))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        async with httpx.AsyncClient(timeout=self.timeout_s) as client:
            return _documents(await client.post(**self._request(query, k)))

    def _request(self, query: str, k: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {"question": query, "top_k": k or self.k}
        if self.collections is not None:
            body["collections"] = self.collections
        headers = {"Authorization": f"Bearer {self.api_key.get_secret_value()}"}
        return {"url": f"{self.base_url.rstrip('/')}/rag/retrieve", "json": body, "headers": headers}


def _check(response: httpx.Response) -> None:
    """Raise the server's message for a response that is an error."""
    if response.is_error:
        message = f"{response.status_code} from {response.url}: {_message(response.text)}"
        raise httpx.HTTPStatusError(message, request=response.request, response=response)


def _message(text: str) -> str:
    """The message of an error in OpenAI's shape, or the text as it is."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text


def _documents(response: httpx.Response) -> list[Document]:
    """The documents of a response. Raises httpx.HTTPStatusError with the server's message."""
    _check(response)
    return [_document(passage) for passage in response.json()["passages"]]


def _document(passage: Mapping[str, Any]) -> Document:
    metadata = {name: passage[name] for name in ("title", "doc_id", "score") if passage.get(name) is not None}
    return Document(id=passage["id"] or None, page_content=passage["text"], metadata=metadata)
