# /// script
# dependencies = ["ragas", "openai", "langchain-openai", "langchain-community<0.4"]
# ///
# ragas imports a module that langchain-community 0.4 no longer has.
import asyncio

from checks import ASKED, MODEL, check
from langchain_core.prompt_values import StringPromptValue
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from ragas.embeddings.base import embedding_factory
from ragas.llms import LangchainLLMWrapper, llm_factory
from ragas.metrics.collections import SemanticSimilarity


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


# It sends no schema, but json_object; without an example a model of 135 million parameters repeats the schema.
PROMPT = f"""Example:
Input: Tom is 20 years old and lives in Paris. Who is he, and how old?
Output: {{"name": "Tom", "age": 20}}

Input: {ASKED}
Output: """


def similarity():
    embeddings = embedding_factory("openai", model=MODEL, client=AsyncOpenAI())
    scored = SemanticSimilarity(embeddings=embeddings).ascore(
        reference="Bees dance.", response="A bee dances."
    )
    return 0.5 < asyncio.run(scored).value <= 1


check("llm_factory", lambda: llm_factory(MODEL, client=OpenAI()).generate(PROMPT, Person))
check(
    "LangChain's model",
    lambda: (
        LangchainLLMWrapper(ChatOpenAI(model=MODEL)).generate_text(StringPromptValue(text=ASKED)).generations
    ),
)
check("embedding_factory", lambda: embedding_factory("openai", model=MODEL, client=OpenAI()).embed_text("a"))
check("SemanticSimilarity", similarity)
