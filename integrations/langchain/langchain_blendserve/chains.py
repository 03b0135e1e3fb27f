"""RAG chains that send documents as `documents`, with the call shape of LangChain's own constructors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, format_document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

CONTEXT = "context"  # the key of the documents, in the input and in the result
REFERENCE = "the given documents"  # stands in a prompt where the text of the documents was
QUESTION_ONLY = ChatPromptTemplate.from_messages([("placeholder", "{chat_history}"), ("human", "{input}")])


def create_blend_documents_chain(
    llm: BaseChatModel | Runnable[Any, Any],
    prompt: BasePromptTemplate[Any] | None = None,
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_variable_name: str = CONTEXT,
) -> Runnable[dict[str, Any], Any]:
    """`create_stuff_documents_chain` for a ChatBlendserve: documents are sent beside the prompt and blended.

    prompt: may hold the variable of the documents, as a stuffing prompt does; "the given documents" then stands there.
    Default: earlier messages from `chat_history`, and `input` as the question.
    document_prompt: formats each document; default: its title and its text.
    """
    template, parser = prompt or QUESTION_ONLY, output_parser or StrOutputParser()

    def chain(inputs: dict[str, Any]) -> Runnable[Any, Any]:
        documents = _formatted(inputs[document_variable_name], document_prompt)
        fill = RunnablePassthrough.assign(**{document_variable_name: lambda _: REFERENCE})
        return fill | template | llm.bind(documents=documents) | parser

    return RunnableLambda(chain).with_config(run_name="blend_documents_chain")


def create_blend_chain(
    llm: BaseChatModel | Runnable[Any, Any],
    retriever: BaseRetriever | Runnable[dict[str, Any], list[Document]],
    prompt: BasePromptTemplate[Any] | None = None,
    **kwargs: Any,
) -> Runnable[dict[str, Any], dict[str, Any]]:
    """`create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt))`, blended.

    Takes {"input": question}, returns input, context and answer. kwargs: as in `create_blend_documents_chain`.
    """
    retrieve = RunnableLambda(_question) | retriever if isinstance(retriever, BaseRetriever) else retriever
    documents = RunnablePassthrough.assign(context=retrieve.with_config(run_name="retrieve_documents"))
    answer = create_blend_documents_chain(llm, prompt, **kwargs)
    return documents.assign(answer=answer).with_config(run_name="retrieval_chain")


def _question(inputs: dict[str, Any]) -> str:
    return str(inputs["input"])


def _formatted(
    documents: Sequence[Document], prompt: BasePromptTemplate[str] | None
) -> Sequence[Document | dict[str, Any]]:
    if prompt is None:
        return documents
    return [{"text": format_document(d, prompt), "id": d.id or ""} for d in documents]
