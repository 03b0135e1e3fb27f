"""Fuzz a running server from its own OpenAPI description: no request may be answered with a 500.

    pip install 'blendserve[fuzz]'
    blendserve serve --index indexes/demo &
    python -m tests.endurance.fuzz_api http://127.0.0.1:8000 --examples 200

Random text names nothing that is there, and would be turned away at the door. So before it is sent, three of four
requests get names of things that are there (fuzz_names.py): the model, a collection, documents that this script has added
to it, their job. Documents of these names come and go; give it an index that may change.

The exit code is 1 if a request was answered with a 5xx, or was not answered.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

DOCUMENTS = [f"fuzz-{n}" for n in range(4)]


def _call(url: str, key: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, headers)) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _names(url: str, key: str | None) -> dict[str, Any]:
    """What there is to be named, some of it made for this."""
    model = _call(f"{url}/v1/models", key)["data"][0]
    collection = model["x_blendserve"]["collections"][0]
    documents = [{"id": name, "text": f"This is said of {name}."} for name in DOCUMENTS]
    job = _call(f"{url}/v1/documents", key, {"collection": collection, "documents": documents})
    return {"model": model["id"], "collection": collection, "documents": DOCUMENTS, "job": job["id"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="of the server")
    parser.add_argument("--examples", type=int, default=100, help="requests of a kind, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", help="API key, where the server has keys")
    args = parser.parse_args()
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{args.url}/openapi.json"),
        *("--checks", "not_a_server_error"),
        *("--max-examples", str(args.examples), "--seed", str(args.seed)),
        *("--request-timeout", "60", "--generation-database", "none"),
        *(("--header", f"Authorization: Bearer {args.key}") if args.key else ()),
    ]
    hooks = {
        "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("fuzz_names.py")),
        "BLENDSERVE_FUZZ_NAMES": json.dumps(_names(args.url.rstrip("/"), args.key)),
    }
    with tempfile.TemporaryDirectory() as scratch:  # it leaves a cache where it runs
        done = subprocess.run(command, cwd=scratch, check=False, env={**os.environ, **hooks})
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
