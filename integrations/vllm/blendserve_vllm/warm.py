"""`blendserve-warm-vllm`: the chunks of a corpus, computed and stored by a vLLM server with the connector."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from blendserve import console
from blendserve.cli.app import run
from blendserve.cli.core import CorpusArg, no_prior
from blendserve.cli.options import option, single_command, with_settings
from blendserve.config import Config
from blendserve.console import Output
from blendserve.errors import InputError
from blendserve.models.checkpoint import first_line

UrlArg = Annotated[str, typer.Argument(help="Address of the vLLM server, such as http://127.0.0.1:8000.")]
API_KEY = "VLLM_API_KEY"  # environment variable; vLLM's server reads it, too
TIMEOUT_S = 600.0  # of one chunk, behind the server's other requests
REMEDY = "start it with BlendConnector, and give its settings file here, too"

log = logging.getLogger(__name__)


@single_command
@with_settings("model.name", "retrieve.chunk_tokens")
def app(
    url: UrlArg,
    corpus: CorpusArg,
    settings: Config,
    limit: int | None = option(None, "Number of passages to store; all if not set.", min=1),
) -> Output:
    """Let a vLLM server compute and store the KV of a corpus's chunks.

    The server computes chunks with its own model, and stores them in the store of its connector. At the end it fits a
    correction prior on prompts of these chunks, if the correction uses one. Give the model and the settings file (-c) of
    the server, so that chunks are computed after the same context. The API key of the server is read from VLLM_API_KEY.
    The exit code is 1 if a chunk was not stored.
    """
    from blendserve.blend.priors import MAX_PROMPT_TOKENS, prompts_of  # torch and all the rest: seconds
    from blendserve.engine.prompt import PromptBuilder
    from blendserve.models.loader import load_tokenizer
    from blendserve.registry import CORRECTIONS

    prompts = PromptBuilder(load_tokenizer(settings.model), settings.prompt)
    chunks = passages_of(corpus, settings, prompts)[:limit]
    done = {"chunks": len(chunks), "stored": 0, "tokens": 0, "tokens_fitted": 0}
    has_prior = False
    with _client(url) as http:
        served = _call(http, "GET", "/v1/models")["data"][0]
        with console.progress("Storing", "chunks") as update:
            for n, ids in enumerate(chunks, start=1):
                report = _send(http, served["id"], "store", [*prompts.kv_context, *ids])
                done["stored"] += bool(report.get("tokens_stored"))
                done["tokens"] += report.get("tokens_stored", 0)
                update(n, len(chunks))
        if done["stored"] and CORRECTIONS.load(settings.blend.correction).uses_prior:
            to_fit = prompts_of(chunks, prompts.prefix, served.get("max_model_len", MAX_PROMPT_TOKENS) - 1)
            with console.progress("Fitting the correction prior", "prompts") as update:
                for n, prompt in enumerate(to_fit, start=1):
                    report = _send(http, served["id"], "fit", prompt.ids)
                    has_prior = "correction" in report  # before this
                    if has_prior:
                        break
                    done["tokens_fitted"] = report.get("tokens_fitted", done["tokens_fitted"])
                    update(n, len(to_fit))
    missing = done["chunks"] - done["stored"]
    text = f"{done['stored']} chunks stored ({done['tokens']:,} tokens), {missing} not stored"
    if done["tokens_fitted"]:
        text += f"; correction prior fitted on {done['tokens_fitted']:,} tokens"
    else:
        why = "the store has a correction prior" if has_prior else no_prior(settings, done["tokens"])
        text += f"; {why}"
    return Output(done, f"{text}: {REMEDY}" if missing else text, int(missing > 0))


def _send(http: httpx.Client, model: str, task: str, ids: Sequence[int]) -> dict[str, Any]:
    """Have the connector do something with a prompt -> its report."""
    body = {"model": model, "prompt": [*ids], "max_tokens": 1, "kv_transfer_params": {"blendserve": task}}
    answer = _call(http, "POST", "/v1/completions", body)
    report: dict[str, Any] = (answer.get("kv_transfer_params") or {}).get("blendserve") or {}
    if error := report.get("error"):
        log.warning("task %r failed for a prompt: %s", task, error)
    return report


def passages_of(corpus: Path, settings: Config, prompts: Any) -> list[tuple[int, ...]]:
    """The token ids of a corpus's distinct chunks, as `blendserve index build` splits it. Raises CorpusError."""
    from blendserve.retrieve import TokenCounter, read_documents  # torch and all the rest: seconds
    from blendserve.retrieve.chunker import split

    counter = TokenCounter(settings.model.name, "", lambda passage: len(prompts.chunk(passage)))
    most = settings.retrieve.chunk_tokens
    passages = [p for document in read_documents(corpus) for p in split(document, most, counter.count)]
    return list(dict.fromkeys(ids for ids in prompts.chunk_ids(passages) if ids))


def _client(url: str) -> httpx.Client:
    """Raises InputError."""
    try:
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers)
    except httpx.InvalidURL as error:
        raise InputError(f"{url!r} is not the address of a server: {error}", setting="url") from None


def _call(http: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Raises InputError."""

    try:
        answer = http.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise InputError(
            f"the vLLM server at {http.base_url} does not answer {path}: {first_line(error)}",
            setting="url",
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run(app, argv)


if __name__ == "__main__":
    sys.exit(main())
