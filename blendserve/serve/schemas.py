"""The bodies of requests that several APIs share, and of blendserve's own. Unknown fields are ignored (notices.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from blendserve.config import CorrectionName, Method, PolicyName, Ratio, Similarity
from blendserve.core import Document, Passage
from blendserve.engine.request import AnswerRules
from blendserve.engine.text_forms import FORMS, TextForm
from blendserve.errors import InputError
from blendserve.serve.engine_client import QueryRequest
from blendserve.serve.fields import (
    MAX_ITEMS,
    Body,
    JsonObject,
    Label,
    Name,
    Names,
    Stop,
    Stops,
    Text,
    TokenLimit,
)


class PassageIn(Body):
    """A passage that the client sends. Hugging Face's name for its text is `contents`."""

    text: Text = Field(validation_alias=AliasChoices("text", "contents", "content"))
    title: Text = ""
    id: Label = ""

    def passage(self) -> Passage:
        return Passage(self.text, self.title, self.id)


Passages = Annotated[list[PassageIn], Field(max_length=MAX_ITEMS)]
Scalar = Label | bool | int | float
Filter = Annotated[
    dict[Label, Scalar | Annotated[list[Scalar], Field(min_length=1, max_length=MAX_ITEMS)]],
    Field(max_length=16),
]
"""Metadata fields and the value that a document must have; a list allows each of its values."""


class BlendFields(Body):
    """Fields of BlendConfig that a request may set. None = the server's setting."""

    method: Method | None = None
    policy: PolicyName | None = None
    ratio: Ratio | None = None
    refine: Ratio | None = None
    correction: CorrectionName | None = None

    @property
    def blend(self) -> dict[str, Any]:
        return self.model_dump(include=set(BlendFields.model_fields))


class SearchFields(Body):
    """What is searched for passages. None = the server's setting, and all collections that the key may use."""

    top_k: Annotated[int, Field(ge=1, le=MAX_ITEMS)] | None = None
    min_score: Similarity | None = None
    filter: Filter | None = None
    collections: Names | None = None


class BlendOptions(BlendFields, SearchFields):
    """Options that OpenAI's API does not have. None = the server's setting."""

    passages: Passages | None = None


class Question(Body):
    """Fields of every request for an answer: documents and sampling parameters.

    documents: chunks of the prompt, in this order; the field of vLLM and Hugging Face. The same as `passages`.
    """

    documents: Passages | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_tokens: TokenLimit = None
    stop: Stop | Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def rules(self) -> AnswerRules:
        """What is asked of the answer beyond the settings."""
        return AnswerRules()

    def query(self, question: str, options: BlendOptions) -> QueryRequest:
        """The request to the engine. Raises InputError if `documents` and `passages` are both given."""
        if self.documents is not None and options.passages is not None:
            raise InputError("documents and passages mean the same: send one of these fields")
        passages = options.passages if self.documents is None else self.documents
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return QueryRequest(
            question=question,
            passages=None if passages is None else tuple(passage.passage() for passage in passages),
            top_k=options.top_k,
            min_score=options.min_score,
            filter=options.filter or {},
            blend=options.blend,
            decode={**sampling, "max_new_tokens": self.token_limit, "stop": stop or None},
            collections=None if options.collections is None else tuple(options.collections),
            rules=self.rules,
        )


class Turn(Body):
    """An earlier message of a conversation."""

    role: Literal["user", "assistant"]
    content: Text


class RagRequest(Question, BlendOptions):
    """POST /v1/rag/query"""

    question: Annotated[Text, Field(pattern=r"\S")]
    history: Annotated[list[Turn], Field(max_length=MAX_ITEMS)] = Field(default_factory=list)
    plain: bool = False
    explain: bool = False
    check: bool = False


class RetrieveRequest(SearchFields):
    """POST /v1/rag/retrieve"""

    question: Annotated[Text, Field(pattern=r"\S")]


def _no_token_ids(given: Any) -> Any:
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(first, (int, list)):
        raise ValueError("token ids are not supported: send texts")
    return given


FilledText = Annotated[Text, Field(min_length=1)]


class EmbeddingsRequest(Body):
    """POST /v1/embeddings. input_type: some embedders put another prompt before questions than before passages."""

    input: Annotated[
        FilledText | Annotated[list[FilledText], Field(min_length=1, max_length=MAX_ITEMS)],
        BeforeValidator(_no_token_ids),
    ]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    input_type: Literal["query", "passage"] | None = None
    user: Label | None = None

    @property
    def texts(self) -> list[str]:
        """All texts of the input."""
        return [self.input] if isinstance(self.input, str) else self.input


class RerankDocument(Body):
    text: Text


class RerankRequest(Body):
    """POST /v1/rerank"""

    query: FilledText
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1, max_length=MAX_ITEMS)]
    model: Name | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0: all of them, as in vLLM
    return_documents: bool | None = None
    user: Label | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class DocumentIn(Body):
    text: Annotated[Text, Field(min_length=1)]
    title: Label = ""
    id: Label = ""
    metadata: JsonObject = Field(default_factory=dict)

    def document(self) -> Document:
        return Document(self.text, self.title.strip(), self.id, self.metadata)


class DocumentsRequest(Body):
    """POST /v1/documents"""

    documents: Annotated[list[DocumentIn], Field(min_length=1, max_length=MAX_ITEMS)]
    collection: Name | None = None


class CacheRequest(Body):
    """POST /v1/cache/...: the request's own passages, or a collection's: all, or by document or passage id."""

    passages: Passages | None = None
    collection: Name | None = None
    documents: Names | None = None
    ids: Names | None = None
    forms: list[TextForm] = Field(["plain"], alias="as", min_length=1, max_length=len(FORMS))
