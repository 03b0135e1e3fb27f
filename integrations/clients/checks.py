"""What the scripts of this folder share: where the server is, and a line for each feature."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
OPENAI = f"{URL}/v1"
ASKED = "Ann is 31 years old and lives in Rome. Who is she, and how old?"
# Without an example a model of 135 million parameters repeats a schema that stands in its prompt.
EXAMPLE = f"""Example:
Input: Tom is 20 years old and lives in Paris. Who is he, and how old?
Output: {{"name": "Tom", "age": 20}}

Input: {ASKED}
Output: """
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def check(name: str, feature: Callable[[], Any]) -> None:
    """Run a feature of a client, and print whether it works: it returns something true and raises nothing."""
    try:
        found = feature()
        print(f"ok {name}" if found else f"failed {name}: returned {found!r}", flush=True)
    except Exception as error:
        traceback.print_exc()
        said = " ".join(str(error).split())[:160]
        print(f"failed {name}: {type(error).__name__}: {said}", flush=True)
