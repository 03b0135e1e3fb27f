# /// script
# dependencies = ["guidellm"]
# ///
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, check

N_REQUESTS, N_TOKENS = 3, 12


def metrics():
    """The metrics of a benchmark of a few requests of synthetic text."""
    out = Path(tempfile.mkdtemp()) / "report.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={URL},model={MODEL}"]
    command += ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={N_REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={os.environ['TOKENIZER']}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=20,output_tokens={N_TOKENS}"]
    command += ["--output", f"kind=json,path={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
    (benchmark,) = json.loads(out.read_text("utf-8"))["benchmarks"]
    return benchmark["metrics"]


found = {}
check("run", lambda: found.update(metrics()) or found)
check("output length by ignore_eos", lambda: found["output_token_count"]["successful"]["mean"] == N_TOKENS)
check("usage", lambda: found["prompt_token_count"]["successful"]["mean"] > 0)
