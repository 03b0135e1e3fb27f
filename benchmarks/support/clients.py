"""Clients of OpenAI's and Anthropic's APIs, by what they send: frameworks as installed, and recorded layouts of others.

A client asks one question about some passages, in their order, and reads the stream. A framework builds its own request
(create_stuff_documents_chain, CompactAndRefine, ChatPromptBuilder). A layout is a request as that client's source builds
it, with the parts that change from one request to the next: ranks, the minute, a checksum.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import httpx

from blendserve.config import ServeConfig
from blendserve.engine.chat import Chat
from blendserve.serve.message_schemas import MessagesRequest
from blendserve.serve.openai_schemas import ChatRequest
from blendserve.serve.responses import MATCHED

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
QUESTION = "What is said about this, and where?"
FILE = "notes.md"
TIMEOUT_S = 600.0

Body = dict[str, Any]
OnText = Callable[[str], object]
Ask = Callable[[Sequence[str], Body, OnText], object]
"""(passages, more fields of the request, called with each piece of the answer); `documents`: passages in their place"""


class Sent(NamedTuple):
    """A request."""

    path: str
    body: Body

    @property
    def chat(self) -> Chat:
        """What the model's chat template is given."""
        parsed = MessagesRequest(**self.body) if self.path == MESSAGES else ChatRequest(**self.body)
        return parsed.chat().without_lines(ServeConfig.volatile_lines)[0]


def chat(*messages: Body) -> Sent:
    return Sent(CHAT, {"messages": list(messages)})


def user(text: str) -> Body:
    return {"role": "user", "content": text}


class Recorder(httpx.HTTPTransport):
    """Keeps the last request, and the bytes of its response as they are read."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        self.request, self.headers, self.received = request, response.headers, bytearray()
        response.stream = _Copied(response.stream, self.received)
        return response


class _Copied(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, copy: bytearray) -> None:
        self._stream, self._copy = stream, copy

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._copy += part
            yield part

    def close(self) -> None:
        self._stream.close()


class Wire:
    """The connection of a client to the server: a transport that every client's HTTP client takes."""

    def __init__(self, url: str, model: str, new_tokens: int) -> None:
        self.url, self.model, self.new_tokens = f"{url}/v1", model, new_tokens
        self._recorder = Recorder()
        self.options: dict[str, Any] = {"timeout": TIMEOUT_S, "transport": self._recorder}
        self.http = httpx.Client(base_url=url, **self.options)

    @property
    def sent(self) -> Sent:
        """The last request."""
        request = self._recorder.request
        return Sent(request.url.path, json.loads(request.content))

    @property
    def n_matched(self) -> int:
        """Tokens of its prompt that were found in stored chunks, whether the method used them or not."""
        return int(self._recorder.headers.get(MATCHED, "=0").rpartition("=")[2])

    @property
    def report(self) -> dict[str, Any]:
        """What the server reused for it: in the last event that says so."""
        events = reversed(_events(self._recorder.received.decode().splitlines()))
        return next(e["x_blendserve"]["report"] for e in events if "report" in e.get("x_blendserve", ()))

    def stream(self, sent: Sent, on_text: OnText) -> None:
        """Send a request, and read the texts of its stream. Raises httpx.HTTPStatusError."""
        body = {"model": self.model, "max_tokens": self.new_tokens, "stream": True, **sent.body}
        with self.http.stream("POST", sent.path, json=body) as response:
            if response.is_error:
                response.read()
            response.raise_for_status()
            for line in response.iter_lines():
                for event in _events([line]):
                    on_text(_text(event))


class Client(NamedTuple):
    """name: in tables. connect: raises ImportError where its packages are missing. chunk: a passage as it keeps it."""

    name: str
    connect: Callable[[Wire], Ask]
    chunk: Callable[[str], str] = str


def langchain(wire: Wire) -> Ask:
    """LangChain's chain, as its documentation has it."""
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI

    system = "Use the following pieces of context to answer the question at the end.\n\n{context}"
    prompt = ChatPromptTemplate.from_messages([("system", system), ("human", "{input}")])
    model = ChatOpenAI(
        base_url=wire.url,
        api_key="none",
        model=wire.model,
        max_tokens=wire.new_tokens,
        max_retries=0,
        http_client=wire.http,
    )

    def ask(texts: Sequence[str], more: Body, on_text: OnText) -> None:
        chain = create_stuff_documents_chain(model.bind(extra_body=more) if more else model, prompt)
        shown = [] if "documents" in more else texts
        for piece in chain.stream({"input": QUESTION, "context": [Document(text) for text in shown]}):
            on_text(piece)

    return ask


def llama_index(wire: Wire) -> Ask:
    """LlamaIndex's default synthesizer; nodes have the metadata that its file reader shows to models."""
    from llama_index.core import get_response_synthesizer
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-untyped, unused-ignore]

    llm = OpenAILike(
        model=wire.model,
        api_base=wire.url,
        api_key="none",
        is_chat_model=True,
        context_window=1 << 20,
        max_tokens=wire.new_tokens,
        max_retries=0,
        http_client=wire.http,
    )
    synthesizer: Any = get_response_synthesizer(llm=llm, streaming=True)

    def ask(texts: Sequence[str], more: Body, on_text: OnText) -> None:
        llm.additional_kwargs = {"extra_body": more}
        shown = [""] if "documents" in more else texts
        nodes = [NodeWithScore(node=TextNode(text=text, metadata={"file_path": FILE})) for text in shown]
        for piece in synthesizer.synthesize(QUESTION, nodes).response_gen:
            on_text(piece)

    return ask


def haystack(wire: Wire) -> Ask:
    """Haystack's pipeline of a prompt builder and a generator, with the template of its documentation."""
    os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read when it is imported
    from haystack import Document, Pipeline
    from haystack.components.builders import ChatPromptBuilder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    template = (
        "Given these documents, answer the question.\nDocuments:\n    {% for doc in documents %}\n"
        "        {{ doc.content }}\n    {% endfor %}\nQuestion: {{ question }}\nAnswer:"
    )
    logging.getLogger("haystack").setLevel(logging.ERROR)  # warns of each answer that ends by its limit
    llm = OpenAIChatGenerator(
        api_key=Secret.from_token("none"),
        api_base_url=wire.url,
        model=wire.model,
        generation_kwargs={"max_tokens": wire.new_tokens},
        max_retries=0,
        http_client_kwargs=wire.options,
    )
    pipeline = Pipeline()
    pipeline.add_component(
        "prompt", ChatPromptBuilder([ChatMessage.from_user(template)], required_variables="*")
    )
    pipeline.add_component("llm", llm)
    pipeline.connect("prompt.prompt", "llm.messages")

    def ask(texts: Sequence[str], more: Body, on_text: OnText) -> None:
        documents = [Document(content=text) for text in ([] if "documents" in more else texts)]
        options = {
            "streaming_callback": lambda chunk: on_text(chunk.content),
            "generation_kwargs": {"extra_body": more},
        }
        pipeline.run({"prompt": {"documents": documents, "question": QUESTION}, "llm": options})

    return ask


Layout = Callable[[Sequence[str], int], Sent]
"""(passages, number of the request) -> the request"""


def layout(build: Layout) -> Callable[[Wire], Ask]:
    """A client that sends what `build` makes; passages in `documents` go to our own API."""

    def connect(wire: Wire) -> Ask:
        n = 0

        def ask(texts: Sequence[str], more: Body, on_text: OnText) -> None:
            nonlocal n
            n += 1
            sent = chat(user(QUESTION)) if "documents" in more else build(texts, n)
            wire.stream(sent._replace(body={**sent.body, **more}), on_text)

        return ask

    return connect


def open_webui(texts: Sequence[str], n: int) -> Sent:
    """The template in the last user message; a rank in front of each passage."""
    sources = "\n".join(f'<source id="{i}" name="{FILE}">{text}</source>' for i, text in enumerate(texts, 1))
    task = (
        "### Task:\nRespond to the user query using the provided context, incorporating inline citations in the format "
        '[id] **only when the <source> tag includes an explicit id attribute** (e.g., <source id="1">).'
    )
    return chat(user(f"{task}\n\n<context>\n{sources}\n</context>\n\n{QUESTION}"))


def anything_llm(texts: Sequence[str], n: int) -> Sent:
    """The minute in front of all passages."""
    minute = datetime(2026, 8, 1, 9) + timedelta(minutes=n)
    prompt = (
        "Given the following conversation, relevant context, and a follow up question, reply with an answer to the "
        f"current question the user is asking. The current date and time is {minute:%B %d, %Y at %H:%M}."
    )
    parts = (f"[CONTEXT {i}]:\n{text}\n[END CONTEXT {i}]\n\n" for i, text in enumerate(texts))
    system = {"role": "system", "content": f"{prompt}\nContext:\n{''.join(parts)}"}
    return chat(system, user(QUESTION))


def with_metadata(text: str) -> str:
    """As AnythingLLM's splitter writes a chunk."""
    return f"<document_metadata>\nsourceDocument: {FILE}\n</document_metadata>\n\n{text}"


def agent(texts: Sequence[str], n: int) -> Sent:
    """The results of two searches behind the question, each passage with its source."""
    half = (len(texts) + 1) // 2
    messages = [user(QUESTION)]
    for i, some in enumerate((texts[:half], texts[half:])):
        arguments = json.dumps({"query": f"{QUESTION} ({n}.{i})"})
        function = {"name": "retrieve_context", "arguments": arguments}
        call = {"id": f"call_{n}_{i}", "type": "function", "function": function}
        found = "\n\n".join(f"Source: {{'source': '{FILE}'}}\nContent: {text}" for text in some)
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": found},
        ]
    return chat(*messages)


def anthropic(texts: Sequence[str], n: int) -> Sent:
    """A checksum at the head of the system prompt; search results and documents as blocks, in turns."""
    header = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={n:05x};"
    blocks = [(_document if i % 2 else _search_result)(text) for i, text in enumerate(texts)]
    content = [*blocks, {"type": "text", "text": QUESTION}]
    system = [{"type": "text", "text": text} for text in (header, "Answer from the sources, and cite them.")]
    return Sent(MESSAGES, {"system": system, "messages": [{"role": "user", "content": content}]})


CLIENTS: Mapping[str, Client] = {
    "langchain": Client("LangChain", langchain),
    "llama-index": Client("LlamaIndex", llama_index),
    "haystack": Client("Haystack", haystack),
    "open-webui": Client("Open WebUI", layout(open_webui)),
    "anythingllm": Client("AnythingLLM", layout(anything_llm), with_metadata),
    "anthropic": Client("Anthropic blocks", layout(anthropic)),
    "agent": Client("agent", layout(agent)),
}


def _search_result(text: str) -> Body:
    names = {"source": f"https://example.org/{FILE}", "title": FILE, "citations": {"enabled": True}}
    return {"type": "search_result", **names, "content": [{"type": "text", "text": text}]}


def _document(text: str) -> Body:
    source = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "title": FILE, "source": source}


def _events(lines: Iterable[str]) -> list[Body]:
    """The JSON objects of a stream's lines, or of an answer that is no stream."""
    data = (line.removeprefix("data: ") for line in lines)
    return [json.loads(text) for text in data if text.startswith("{")]


def _text(event: Body) -> str:
    """The text in an event of OpenAI's or Anthropic's stream."""
    choices = event.get("choices")
    delta = choices[0]["delta"] if choices else event.get("delta", {})
    return str(delta.get("content") or delta.get("text") or "")
