# /// script
# dependencies = ["openai-agents"]
# ///
from agents import Agent, Runner, set_tracing_disabled
from checks import ASKED, MODEL, check
from pydantic import BaseModel, Field

set_tracing_disabled(True)


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


check("default model class", lambda: Runner.run_sync(Agent(name="a", model=MODEL), ASKED).final_output)
check(
    "output_type",
    lambda: Runner.run_sync(Agent(name="a", model=MODEL, output_type=Person), ASKED).final_output,
)
