# /// script
# dependencies = ["open-webui"]
# ///
# limit_s: 1500
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
from checks import MODEL, OPENAI, check

START_S, POLL_S = 500, 2
TEXT = "The lighthouse keeper of Sandmere is called Orla Finch. She has kept the light since 1987.\n"
QUESTION = "What is the lighthouse keeper of Sandmere called?"
SETTINGS = {
    "OPENAI_API_BASE_URL": OPENAI,
    "WEBUI_AUTH": "False",
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "ENABLE_OLLAMA_API": "False",
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_OPENAI_API_BASE_URL": OPENAI,
    "RAG_OPENAI_API_KEY": "none",
    "RAG_EMBEDDING_MODEL": MODEL,
    "CORS_ALLOW_ORIGIN": "http://127.0.0.1",
}


def listed(name):
    return form_of(
        name, {"type": "array", "items": {"type": "string", "maxLength": 80}, "minItems": 1, "maxItems": 3}
    )


def form_of(name, schema):
    return {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}


# An administrator's setting. Without it a model of 135 million parameters writes several objects, or none.
TASKS = {
    "anyOf": [form_of("title", {"type": "string", "maxLength": 60}), listed("follow_ups"), listed("queries")]
}
FORM = {"type": "json_schema", "json_schema": {"name": "task", "schema": TASKS}}


@contextmanager
def running():
    """A client of Open WebUI's own API, signed in."""
    folder = Path(tempfile.mkdtemp())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        str(Path(sys.executable).with_name("open-webui")),
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    environment = {**os.environ, **SETTINGS, "DATA_DIR": str(folder), "WEBUI_SECRET_KEY": "none"}
    environment["PYTHONPATH"] = ""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            wait(http, process, folder / "log")
            token = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
            http.headers["Authorization"] = f"Bearer {token}"
            yield http
    finally:
        process.kill()
        process.wait()


def wait(http, process, log):
    """Until it answers. Raises RuntimeError if it ends before, or takes too long."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(POLL_S)
    raise RuntimeError(log.read_text()[-300:])


def asked(http, path, **fields):
    messages = [{"role": "user", "content": QUESTION}]
    response = http.post(path, json={"model": MODEL, "messages": messages, **fields})
    assert response.status_code == 200, response.text[:300]
    return response


def content(http, path, **fields):
    """The text of an answer that ended by itself."""
    choice = asked(http, path, **fields).json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return choice["message"]["content"]


def task(http, name, **fields):
    """The JSON that Open WebUI reads in the answer to a task of its own."""
    said = content(http, f"/api/v1/tasks/{name}/completions", **fields)
    return json.loads(said[said.index("{") : said.rindex("}") + 1])


def uploaded(http):
    file = http.post(
        "/api/v1/files/", files={"file": ("keepers.txt", TEXT)}, params={"process_in_background": False}
    )
    assert file.status_code == 200, file.text[:300]
    return [{"type": "file", "id": file.json()["id"]}]


def sources(http):
    """The passages of an uploaded file that an answer came from."""
    streamed = asked(http, "/api/chat/completions", files=uploaded(http), stream=True).text
    return "Orla Finch" in streamed and "keepers.txt" in streamed and '"sources"' in streamed


with running() as http:
    chat = "/api/chat/completions"
    check("models", lambda: MODEL in [each["id"] for each in http.get("/api/models").json()["data"]])
    check("chat", lambda: asked(http, chat, stream=False).json()["choices"][0]["message"]["content"])
    check("chat, streamed", lambda: "data: [DONE]" in asked(http, chat, stream=True).text)
    tasks = http.get("/api/v1/tasks/config").json() | {"TASK_MODEL_PARAMS": {"response_format": FORM}}
    http.post("/api/v1/tasks/config/update", json=tasks).raise_for_status()
    check("title", lambda: task(http, "title")["title"])
    check("follow-ups", lambda: task(http, "follow_up")["follow_ups"])
    check("search queries", lambda: task(http, "queries", type="retrieval")["queries"])
    check("upload with sources", lambda: sources(http))
