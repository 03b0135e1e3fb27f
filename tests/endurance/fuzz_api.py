"""Fuzz a running server from its own OpenAPI description: no request may be answered with a 500.

    pip install '.[fuzz]'
    blendserve serve --index indexes/demo &
    export BLENDSERVE_URL=http://127.0.0.1:8000 SCHEMATHESIS_HOOKS=tests.endurance.fuzz_api
    schemathesis run $BLENDSERVE_URL/openapi.json --checks not_a_server_error --max-examples 200

Schemathesis loads this file. Random text names nothing that exists, and would be refused at once. So three of four
requests get names of things that exist: the model, a collection, documents that are added here, their job. Documents of
these names come and go; give it an index that may change. Where the server has keys, set BLENDSERVE_API_KEY, too, and
give schemathesis the option --header 'Authorization: Bearer KEY'.
"""

from __future__ import annotations

import os
import random
from typing import Any

import httpx
import schemathesis

LONGEST = 4  # tokens of an answer: they cost time, and find nothing
QUESTION = "What is said?"
DOCUMENTS = [f"fuzz-{n}" for n in range(4)]


def existing() -> dict[str, str]:
    """The server's model and a collection of it, in which there are documents now, and the job that added them."""
    key = os.environ.get("BLENDSERVE_API_KEY", "none")
    with httpx.Client(
        base_url=os.environ["BLENDSERVE_URL"], headers={"Authorization": f"Bearer {key}"}
    ) as http:
        model = http.get("/v1/models").json()["data"][0]
        collection = model["x_blendserve"]["collections"][0]
        documents = [{"id": name, "text": f"This is said of {name}."} for name in DOCUMENTS]
        job = http.post("/v1/documents", json={"collection": collection, "documents": documents}).json()
    return {"model": model["id"], "collection": collection, "job_id": job["id"]}


NAMES = existing()


@schemathesis.hook  # type: ignore[untyped-decorator, unused-ignore]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Three of four requests; which ones depends on what they are."""
    dice = random.Random(f"{case.path} {case.body!r} {case.path_parameters!r}")
    if dice.random() < 0.25:
        return
    names = {**NAMES, "doc_id": dice.choice(DOCUMENTS)}
    for parameters in (case.path_parameters, case.query):
        if isinstance(parameters, dict):
            parameters.update({name: names.get(name, value) for name, value in parameters.items()})
    if isinstance(case.body, dict):
        fill(case.body, dice)


def fill(body: dict[str, Any], dice: random.Random) -> None:
    """Real names, a question, and a short answer."""
    body.update({name: NAMES[name] for name in ("model", "collection") if body.get(name) is not None})
    if body.get("collections"):
        body["collections"] = [NAMES["collection"]]
    if isinstance(body.get("documents"), list):
        named = [(document, dice.choice(DOCUMENTS)) for document in body["documents"][:3]]
        body["documents"] = [{**d, "id": name} if isinstance(d, dict) else name for d, name in named]
    if isinstance(body.get("x_blendserve"), dict):
        fill(body["x_blendserve"], dice)
    for name in ("question", "prompt"):
        if isinstance(body.get(name), str):
            body[name] += f" {QUESTION}"
    if isinstance(messages := body.get("messages"), list):
        body["messages"] = [*messages[: dice.randrange(4)], {"role": "user", "content": QUESTION}]
    if body.keys() & {"question", "prompt", "messages"}:
        body["max_tokens"] = dice.randint(1, LONGEST)
        body.pop("max_completion_tokens", None)
