# /// script
# dependencies = ["ragas", "openai", "langchain-openai", "langchain-community<0.4"]
# ///
# ragas imports a module that langchain-community 0.4 no longer has.
import asyncio

from checks import ASKED, EXAMPLE, MODEL, check
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


def similarity():
    embeddings = embedding_factory("openai", model=MODEL, client=AsyncOpenAI())
    scored = SemanticSimilarity(embeddings=embeddings).ascore(
        reference="Bees dance.", response="A bee dances."
    )
    return 0.5 < asyncio.run(scored).value <= 1


check("llm_factory", lambda: llm_factory(MODEL, client=OpenAI()).generate(EXAMPLE, Person))
check(
    "LangChain's model",
    lambda: (
        LangchainLLMWrapper(ChatOpenAI(model=MODEL)).generate_text(StringPromptValue(text=ASKED)).generations
    ),
)
check("embedding_factory", lambda: embedding_factory("openai", model=MODEL, client=OpenAI()).embed_text("a"))
check("SemanticSimilarity", similarity)
