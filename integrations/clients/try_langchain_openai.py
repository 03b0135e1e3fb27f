# /// script
# dependencies = ["langchain-openai", "langchain"]
# ///
from checks import ASKED, MODEL, check
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


model = ChatOpenAI(model=MODEL)
check("invoke", lambda: model.invoke(ASKED).content)
check("stream", lambda: "".join(str(each.content) for each in model.stream(ASKED)))
for method in ("json_schema", "function_calling", "json_mode"):
    asked = ASKED + (' Answer in JSON: {"name": ..., "age": ...}' if method == "json_mode" else "")
    check(
        f"with_structured_output {method}",
        lambda: model.with_structured_output(Person, method=method).invoke(asked),
    )
check("tool_choice any", lambda: model.bind_tools([Person], tool_choice="any").invoke(ASKED).tool_calls)
check("responses api", lambda: ChatOpenAI(model=MODEL, use_responses_api=True).invoke(ASKED).content)
check("logprobs", lambda: model.bind(logprobs=True, max_tokens=5).invoke(ASKED).response_metadata["logprobs"])
check("completions", lambda: OpenAI(model=MODEL, max_tokens=9).invoke("Once upon a time"))
check(
    "embeddings",
    lambda: OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False).embed_documents(["a", "b"]),
)
