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


def ask(client):
    return client.chat.completions.create(
        model=MODEL, response_model=Person, max_retries=1, messages=[{"role": "user", "content": ASKED}]
    )


for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "MD_JSON", "JSON_SCHEMA"):
    check(mode, lambda: ask(instructor.from_openai(OpenAI(), mode=getattr(instructor.Mode, mode))))
check("from_provider", lambda: ask(instructor.from_provider(f"openai/{MODEL}")))
