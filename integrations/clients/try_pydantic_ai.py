# /// script
# dependencies = ["pydantic-ai-slim[openai]"]
# ///
from checks import ASKED, EXAMPLE, MODEL, check
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


model = OpenAIChatModel(MODEL)
check("text", lambda: Agent(model).run_sync(ASKED).output)
check("text, responses", lambda: Agent(OpenAIResponsesModel(MODEL)).run_sync(ASKED).output)
for kind in (ToolOutput, NativeOutput, PromptedOutput):
    asked = EXAMPLE if kind is PromptedOutput else ASKED  # it sends json_object, and the schema in the prompt
    check(kind.__name__, lambda: Agent(model, output_type=kind(Person)).run_sync(asked).output)
