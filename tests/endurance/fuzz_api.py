"""Fuzz a running server from its own OpenAPI description: no request may be answered with a 500.

    pip install 'blendserve[fuzz]'
    blendserve serve --index indexes/demo &
    python -m tests.endurance.fuzz_api http://127.0.0.1:8000 --examples 200

Random text names nothing that exists, and would be refused at once. So three of four requests get names of things that
exist: the model, a collection, documents that this script has added, their job. Schemathesis loads this file for that.
Documents of these names come and go; give it an index that may change.

The exit code is 1 if a request was answered with a 5xx, or was not answered.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from typing import Any
from urllib.request import Request, urlopen

NAMES = "BLENDSERVE_FUZZ_NAMES"  # set in schemathesis' process
LONGEST = 4  # tokens of an answer: they cost time, and find nothing
QUESTION = "What is said?"

if NAMES in os.environ:
    import schemathesis

    known = json.loads(os.environ[NAMES])

    @schemathesis.hook  # type: ignore[untyped-decorator, unused-ignore]
    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        """Three of four requests; which ones depends on what they are."""
        dice = random.Random(f"{case.path} {case.body!r} {case.path_parameters!r}")
        if dice.random() < 0.25:
            return
        if isinstance(case.path_parameters, dict):
            some = {
                "model": known["model"],
                "job_id": known["job"],
                "doc_id": dice.choice(known["documents"]),
            }
            case.path_parameters.update({k: v for k, v in some.items() if k in case.path_parameters})
        if case.query and "collection" in case.query:
            case.query["collection"] = known["collection"]
        if isinstance(case.body, dict):
            fill(case.body, dice)

    def fill(body: dict[str, Any], dice: random.Random) -> None:
        """Real names, a question, and a short answer."""
        body.update({name: known[name] for name in ("model", "collection") if body.get(name) is not None})
        if body.get("collections"):
            body["collections"] = [known["collection"]]
        if isinstance(body.get("documents"), list):
            named = [(document, dice.choice(known["documents"])) for document in body["documents"][:3]]
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


def call(url: str, key: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with urlopen(Request(url, None if body is None else json.dumps(body).encode(), headers)) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="of the server")
    parser.add_argument("--examples", type=int, default=100, help="requests of a kind, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", help="API key, where the server has keys")
    args = parser.parse_args()
    model = call(f"{args.url}/v1/models", args.key)["data"][0]
    names = {"model": model["id"], "collection": model["x_blendserve"]["collections"][0]}
    documents = [{"id": f"fuzz-{n}", "text": f"This is said of fuzz-{n}."} for n in range(4)]
    body = {"collection": names["collection"], "documents": documents}
    job = call(f"{args.url}/v1/documents", args.key, body)["id"]
    names |= {"documents": [document["id"] for document in documents], "job": job}
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{args.url}/openapi.json"),
        *("--checks", "not_a_server_error"),
        *("--max-examples", str(args.examples), "--seed", str(args.seed)),
        *("--request-timeout", "60", "--generation-database", "none"),
        *(("--header", f"Authorization: Bearer {args.key}") if args.key else ()),
    ]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": __file__, NAMES: json.dumps(names)}
    with tempfile.TemporaryDirectory() as scratch:  # it leaves a cache where it runs
        return 1 if subprocess.run(command, cwd=scratch, check=False, env=environment).returncode else 0


if __name__ == "__main__":
    sys.exit(main())
