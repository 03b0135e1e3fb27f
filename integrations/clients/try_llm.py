# /// script
# dependencies = ["llm"]
# ///
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import ASKED, MODEL, OPENAI, check

folder = Path(tempfile.mkdtemp())
own = {"model_name": MODEL, "api_base": OPENAI}
models = [
    {"model_id": "local", **own, "supports_schema": True, "supports_tools": True},
    {"model_id": "local-completion", **own, "completion": True},
]
(folder / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")  # JSON is YAML


def llm(*options):
    """What the command prints."""
    command = [sys.executable, "-m", "llm", "prompt", *options]
    environment = {**os.environ, "LLM_USER_PATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout


check("chat, streamed", lambda: llm("-m", "local", ASKED))
check("chat, whole", lambda: llm("-m", "local", "--no-stream", ASKED))
check("completion", lambda: llm("-m", "local-completion", "-o", "max_tokens", "9", "Once upon a time"))
check("schema", lambda: json.loads(llm("-m", "local", "--schema", "name, age int", ASKED))["age"] >= 0)
check("functions", lambda: llm("-m", "local", "--functions", "def today() -> str: return 'Monday'", ASKED))
