# /// script
# dependencies = ["instructor", "openai"]
# ///
import instructor
from checks import ASKED, MODEL, check
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


def ask(client, *examples):
    messages = [*examples, {"role": "user", "content": ASKED}]
    return client.chat.completions.create(
        model=MODEL, response_model=Person, max_retries=1, messages=messages
    )


# MD_JSON asks for no grammar, and without an example a model of 135 million parameters repeats the schema.
MARKDOWN = "\n\nReturn the correct JSON response within a ```json codeblock. not the JSON_SCHEMA"
TOM = (
    {"role": "user", "content": f"Tom is 20 years old and lives in Paris. Who is he, and how old?{MARKDOWN}"},
    {"role": "assistant", "content": '```json\n{"name": "Tom", "age": 20}\n```'},
)
for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "MD_JSON", "JSON_SCHEMA"):
    examples = TOM if mode == "MD_JSON" else ()
    check(mode, lambda: ask(instructor.from_openai(OpenAI(), mode=getattr(instructor.Mode, mode)), *examples))
check("from_provider", lambda: ask(instructor.from_provider(f"openai/{MODEL}")))
