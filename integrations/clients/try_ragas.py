# /// script
# dependencies = ["ragas", "openai", "langchain-openai"]
# ///
from checks import ASKED, MODEL, check
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from ragas.embeddings.base import embedding_factory
from ragas.llms import llm_factory


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


check("llm_factory", lambda: llm_factory(MODEL, client=OpenAI()).generate(ASKED, Person))
check("embedding_factory", lambda: embedding_factory("openai", model=MODEL, client=OpenAI()).embed_text("a"))
check(
    "embedding_factory, async client", lambda: embedding_factory("openai", model=MODEL, client=AsyncOpenAI())
)
