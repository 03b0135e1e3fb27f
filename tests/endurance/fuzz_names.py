"""What fuzz_api.py does to a request that schemathesis made up before it is sent: real names for random ones."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import schemathesis

NAMES = json.loads(os.environ["BLENDSERVE_FUZZ_NAMES"])
LONGEST = 4  # tokens of an answer: they cost time, and find nothing
QUESTION = "What is said?"


@schemathesis.hook  # type: ignore[untyped-decorator, unused-ignore]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Three of four requests; which ones depends on what they are."""
    rng = random.Random(f"{case.path} {case.body!r} {case.path_parameters!r}")
    if rng.random() < 0.25:
        return
    if isinstance(case.path_parameters, dict):
        known = {"model": NAMES["model"], "job_id": NAMES["job"], "doc_id": rng.choice(NAMES["documents"])}
        case.path_parameters.update({k: v for k, v in known.items() if k in case.path_parameters})
    if case.query and "collection" in case.query:
        case.query["collection"] = NAMES["collection"]
    if isinstance(case.body, dict):
        _fill(case.body, rng)


def _fill(body: dict[str, Any], rng: random.Random) -> None:
    for name in ("model", "collection"):
        if body.get(name) is not None:
            body[name] = NAMES[name]
    if body.get("collections"):
        body["collections"] = [NAMES["collection"]]
    if isinstance(body.get("documents"), list):
        body["documents"] = [_document(d, rng) for d in body["documents"][:3]]
    if isinstance(body.get("x_blendserve"), dict):
        _fill(body["x_blendserve"], rng)
    _ask(body, rng)


def _document(document: Any, rng: random.Random) -> Any:
    name = rng.choice(NAMES["documents"])
    return {**document, "id": name} if isinstance(document, dict) else name


def _ask(body: dict[str, Any], rng: random.Random) -> None:
    """A question, and a short answer."""
    for name in ("question", "prompt"):
        if isinstance(body.get(name), str):
            body[name] += f" {QUESTION}"
    messages = body.get("messages")
    if isinstance(messages, list):
        body["messages"] = [*messages[: rng.randrange(4)], {"role": "user", "content": QUESTION}]
    if body.keys() & {"question", "prompt", "messages"}:
        body["max_tokens"] = rng.randint(1, LONGEST)
        body.pop("max_completion_tokens", None)
