"""Fuzz a running server from its own OpenAPI description: no request may be answered with a 500.

    pip install 'blendserve[fuzz]'
    blendserve serve --index indexes/demo &
    python scripts/fuzz_api.py http://127.0.0.1:8000 --examples 200

The exit code is 1 if a request was answered with a 5xx, or was not answered.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile


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
    with tempfile.TemporaryDirectory() as scratch:  # it leaves a cache where it runs
        return 1 if subprocess.run(command, cwd=scratch, check=False).returncode else 0


if __name__ == "__main__":
    sys.exit(main())
