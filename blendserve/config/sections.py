"""Settings of the engine, a section for each stage, and of the servers."""

from __future__ import annotations

from datetime import date
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from blendserve.config.base import SECRET, Settings
from blendserve.errors import ConfigError
from blendserve.registry import CORRECTIONS, POLICIES

Method = Literal["auto", "blend", "full", "prefix", "reuse"]
PolicyName = Annotated[str, AfterValidator(POLICIES.word)]
CorrectionName = Annotated[str, AfterValidator(CORRECTIONS.check)]
CorrectionWord = Annotated[str, AfterValidator(CORRECTIONS.word)]
ANSWER_TOKENS = 64  # of an answer whose length nobody sets: enough to look at, and soon measured
KVContext = Literal["prefix", "primer", "bos", "none"]
PassageOrder = Literal["best_first", "best_last"]


def _separator(text: str) -> str:
    """Raises ValueError for white space alone, which ordinary text is full of."""
    if text and not text.strip():
        raise ValueError("a separator of white space alone would cut ordinary text: add other characters")
    return text


def _auto_ratio(text: str) -> str:
    """Raises ValueError."""
    word, colon, least = text.partition(":")
    if word != "auto" or (colon and not 0 <= float(least) <= 1):
        raise ValueError("a ratio is a number from 0 to 1, auto, or auto:R with its minimum")
    return text


def _date(text: str) -> str:
    """Raises ValueError."""
    return date.fromisoformat(text).isoformat()


Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Arithmetic = Literal["exact", "int8"]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
AutoRatio = Annotated[str, AfterValidator(_auto_ratio)]
Similarity = Annotated[float, Field(ge=-1.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0.0)]


class RuntimeConfig(Settings):
    """What a model runs on, and in which number format."""

    dtype: Dtype = "auto"
    """Number format of weights, computation and KV; auto chooses the fastest format on the device."""
    device: str = "auto"
    """Device to run on, such as cpu or cuda:1; auto chooses a GPU if there is one."""
    threads: Positive | None = None
    """Number of CPU threads; if not set, the number of CPUs that the process may use."""
    weights: Literal["as-is", "bf16", "q8_0"] = "as-is"
    """Weights in memory: as the file has them, a GGUF file's dequantised to bf16, or any model's quantised to q8_0 at
    load. On a GPU GGUF files are always dequantised."""
    decode: Arithmetic = "exact"
    """Arithmetic of decoding on a CPU: exact, or int8, which is faster and approximate: by a copy of the weights in int8,
    or for quantised weights by inputs rounded to int8 in groups of 32. Prefill and stored KV are always exact."""


class ModelConfig(RuntimeConfig):
    """The language model that answers."""

    name: str = "smollm2-135m"
    """Model: a bundled name, a folder, a Hugging Face id, or random:SHAPE for random weights."""


class RetrieveConfig(Settings):
    """Documents to passages to nearest passages."""

    embedder: str = "minilm-l6"
    """Embedding model: a bundled name, a folder or a Hugging Face id."""
    reranker: str | None = None
    """Cross-encoder of sentence-transformers, a folder or a Hugging Face id, which orders the 30 best passages and serves
    POST /v1/rerank; if not set, there is none."""
    chunk_tokens: Positive = 512
    """Maximum length of a passage, in tokens of the model, title line included."""
    top_k: Positive = 6
    """Number of passages to retrieve for a question."""
    min_score: Similarity = -1.0
    """Least cosine similarity of a passage to the question, in vectors of the embedder; -1 retrieves any passage."""
    chat_score: Similarity = 0.2
    """Least similarity of the nearest passage for a message of a chat to be answered from passages. Below it, such as for
    "Thanks, bye!", the chat is answered without any; -1 always retrieves."""


class PromptConfig(Settings):
    """The words around the chunks."""

    system: str = "You answer questions from the given passages, briefly and in your own words."
    """System message."""
    instruction: str = "Read the passages, then answer the question."
    """Instruction before the passages."""
    date: Annotated[str, AfterValidator(_date)] = "2026-01-01"
    """Date in prompts whose chat template contains one. It is fixed because chunk KV is computed after it: with another
    date all chunks are computed again. Plain prompts use today's date."""
    order: PassageOrder = "best_last"
    """Order of retrieved passages: by falling score, or by rising score, with the best one next to the question. Passages
    that a request brings stay as they are."""
    separator: Annotated[str, AfterValidator(_separator)] = ""
    """Text that separates chunks inside a question, such as ' # # '. The last part is the question, the parts before it
    are chunks. Empty turns this off."""


class BlendConfig(Settings):
    """Which tokens are recomputed, and what is done for the others."""

    method: Method = "auto"
    """How cached KV is used; auto chooses the fastest method for the prompt on this machine."""
    policy: PolicyName = POLICIES.default
    """Policy that selects the tokens to recompute, with its parameters in brackets: deviation[1,2] selects at these
    layers, step by step."""
    ratio: Ratio | AutoRatio | None = None
    """Fraction of the context tokens to recompute; auto recomputes as many as fit into the loading time, auto:R does the
    same with at least the fraction R. If not set, it is the least one that keeps quality.min_agreement, or 0.15."""
    refine: Ratio = 0.0
    """Fraction of the context tokens to recompute between the first and the second token, so that the rest of the answer
    is closer to full prefill's. For policy query; 0, or less than the ratio, turns this off."""
    correction: CorrectionWord = CORRECTIONS.default
    """Correction of the KV of tokens that are not recomputed, with its parameters in brackets: ridge[penalty=4]."""
    near: bool = False
    """Reuse the KV of identical text in similar cached chunks (near-duplicates)."""


class QualityConfig(Settings):
    """A target for the quality of answers: evidence then chooses the recompute ratio, unless blend.ratio is set."""

    min_agreement: Annotated[float, Field(ge=0.5, le=0.98)] | None = 0.9
    """Target: least mean agreement of answers with full prefill, as a fraction of their tokens; null: no target. At most
    2% of prompts may be farther from full prefill than with full reuse."""
    check_share: Ratio = 0.05
    """Largest fraction of its time that a server compares answers with full prefill, while it is idle. These checks
    adjust the ratio; with 0 the ratio stays."""


class DecodeConfig(Settings):
    """How the answer is written."""

    max_new_tokens: Positive | None = None
    """Maximum length of an answer, in tokens. If not set, an answer to an OpenAI or Anthropic client may fill what the
    prompt leaves of the context, and others have at most 64 tokens."""
    temperature: float = Field(0.0, ge=0.0)
    """Sampling temperature; 0 is greedy decoding."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: total probability of the likeliest tokens to sample from."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 0
    """Random seed of sampling."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""

    @property
    def answer_tokens(self) -> int:
        """Most tokens of an answer."""
        return self.max_new_tokens or ANSWER_TOKENS

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen: logits divided by a very small temperature are no numbers."""
        return self.temperature < 1e-6


def _api_key(key: Any) -> SecretStr:
    """Raises an error that does not repeat the key."""
    text = key.get_secret_value() if isinstance(key, SecretStr) else key
    if not isinstance(text, str) or not text or not all("!" <= c <= "~" for c in text):
        raise PydanticCustomError(SECRET, "must be one or more printable ASCII characters without spaces")
    return SecretStr(text)


def _origin(text: str) -> str:
    """Raises ValueError."""
    parts = urlsplit(text)
    if text == "*" or (parts.scheme and parts.netloc and text.count("/") == 2 and not parts.query):
        return text
    raise ValueError("an origin looks like https://app.example.org or http://localhost:3000; * allows all")


LOOPBACK = ("localhost", "127.0.0.1", "::1")


def _network(text: str) -> str:
    """Raises ValueError."""
    ip_network(text, strict=False)
    return text


def _prefix(path: str) -> str:
    """Raises ValueError."""
    if path and not (path.startswith("/") and path.strip("/") and not path.endswith("/")):
        raise ValueError("a path prefix looks like /llm")
    return path


class HttpConfig(Settings):
    """Address, API keys and limits. Limits hold for each API key without limits of its own; without keys, for each
    client address."""

    host: str = "127.0.0.1"
    """Address to listen on; an address that others can reach needs API keys."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    hosts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Host names of a server without API keys, besides localhost. A request to another name is refused, because a web
    site may have sent it."""
    proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = ()
    """Addresses or networks of trusted proxies, such as 10.0.0.0/8. Their X-Forwarded-For is the client's address."""
    root_path: Annotated[str, AfterValidator(_prefix)] = ""
    """Path prefix under which a proxy publishes the server, such as /llm. It works whether or not the proxy removes
    the prefix."""
    keys: Path | None = None
    """File with API keys (`blendserve keys create`). Without keys, requests need none."""
    api_key: Annotated[SecretStr, BeforeValidator(_api_key)] | None = None
    """A single API key with full access, in addition to those of `keys`. `blendserve serve` also reads it from
    BLENDSERVE_API_KEY, so that it is not in the process list."""
    max_body: ClassVar[int] = 1 << 20  # bytes of a request that is no form of files
    body_s: ClassVar[float] = 30.0  # for a request body
    max_concurrent: Positive = 64
    """Requests per API key that wait or run; further requests get status 429."""
    max_per_minute: Positive = 6000
    """Requests per minute and API key."""
    drain_s: NotNegative = 30.0
    """Time after SIGTERM in which running requests may end, in seconds."""

    @property
    def has_keys(self) -> bool:
        """Whether requests need API keys."""
        return self.keys is not None or self.api_key is not None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return self.host in LOOPBACK


class ServeConfig(HttpConfig):
    """The server."""

    max_upload_mb: Positive = 64
    """Largest form of files for POST /v1/documents, in MB."""
    upload_s: ClassVar[float] = 600.0  # for such a form
    served_model_name: tuple[Annotated[str, Field(min_length=1, max_length=512)], ...] = ()
    """Model names in /v1/models, which requests may use; the first is in responses. By default the name given as
    `--model`, of a folder its last part."""
    cors_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    """Web origins whose pages may call the API from a browser, such as http://localhost:3000; * allows all. By default
    browsers block such calls."""
    slots: Positive = 8
    """Number of requests that decode in one batch."""
    slot_tokens: Positive | None = None
    """Tokens reserved for prompt and answer of a request; by default the model's context length, or fewer where the KV
    of all slots would take more than half of the available memory."""
    gap_s: ClassVar[float] = 0.05  # of a prefill, after which running requests decode one step
    prefill_share: ClassVar[float] = 0.75  # of the time, for a prefill while answers are decoded
    background_share: ClassVar[float] = 0.1  # of the time, for documents and write-back while requests run
    share_mb: ClassVar[int] = 256  # memory for KV that several queued requests load; less on a small machine
    conversations_mb: NotNegative | None = None
    """Memory for the KV of earlier conversation turns, in MB; by default 256, but at most an eighth of what is
    available."""
    scope_headers: ClassVar[tuple[str, ...]] = ("x-blendserve-scope", "x-openwebui-user-id")
    """Headers that name the user of a plain prompt, for front-ends that have one key for all users."""
    volatile_lines: ClassVar[tuple[str, ...]] = ("x-anthropic-billing-header:",)
    """Beginnings of lines that are left out at the start of a plain chat's system message: they differ from request to
    request, and would end the common beginning of all prompts. vLLM leaves them out, too."""
    ping_s: ClassVar[float] = 15.0  # without an event, after which a stream sends a comment line
    log_text: bool = False
    """Write questions to the log."""


class DeliverConfig(HttpConfig):
    """The server of published collections: `blendserve kdn serve`."""

    port: int = Field(8010, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    send_s: ClassVar[float] = 30.0  # without progress, after which a client is disconnected


def check_binding(http: HttpConfig) -> None:
    """Raises ConfigError for an address that others can reach, without API keys."""
    if not http.is_local and not http.has_keys:
        section, option = ("deliver", "") if isinstance(http, DeliverConfig) else ("serve", "--api-key, or ")
        raise ConfigError(
            f"{section}.host {http.host!r} can be reached by others, and no API keys are set: give {option}--keys "
            "with a file made by `blendserve keys create`, or bind to 127.0.0.1"
        )
