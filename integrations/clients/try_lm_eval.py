# /// script
# dependencies = ["lm-eval[api]", "transformers"]
# ///
import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
from checks import MODEL, OPENAI, check
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

folder = Path(tempfile.mkdtemp())
rows = [
    {"question": "The capital of France is", "choices": ["Paris", "a green table"], "answer": 0},
    {"question": "Bees make", "choices": ["stone bridges", "honey"], "answer": 1},
]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
data |= {"test_split": "test", "doc_to_text": "{{question}}"}
written = {
    "task": "written",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
    "metric_list": [{"metric": "exact_match"}],
}
chosen = {
    "task": "chosen",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
for task in (written, chosen):
    (folder / f"{task['task']}.yaml").write_text(
        json.dumps({**data, **task}), encoding="utf-8"
    )  # JSON is YAML


manager = TaskManager(include_path=str(folder))


def results(kind, path, tasks, **options):
    """The metrics of each task."""
    given = {"model": MODEL, "base_url": f"{OPENAI}/{path}", "tokenizer": os.environ["TOKENIZER"]}
    return simple_evaluate(kind, model_args=given, tasks=tasks, task_manager=manager, **options)["results"]


chat = "local-chat-completions", "chat/completions"
plain = "local-completions", "completions"
check("generate_until, chat", lambda: results(*chat, ["written"], apply_chat_template=True)["written"])
check("generate_until", lambda: results(*plain, ["written"])["written"])
check("loglikelihood", lambda: results(*plain, ["chosen"])["chosen"]["acc,none"] == 1)
