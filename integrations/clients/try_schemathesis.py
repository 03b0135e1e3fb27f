# /// script
# dependencies = ["schemathesis"]
# ///
import subprocess
import sys
from pathlib import Path

from checks import URL, check

SECONDS = 60


def finds_nothing(checked):
    """Whether requests that the description allows, and some that it does not, find nothing to say."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{URL}/openapi.json",
        "--no-color",
    ]
    command += ["--checks", checked, "--seed", "1", "--max-examples", "3", "--max-time", str(SECONDS)]
    command += ["--request-timeout", "120"]  # of a long answer
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Test cases:" in done.stdout, (done.stdout + done.stderr)[-300:]
    return done.returncode == 0


check("no 5xx, documented statuses", lambda: finds_nothing("not_a_server_error,status_code_conformance"))
