# /// script
# dependencies = ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like", "llama-index-embeddings-openai", "llama-index-core"]
# ///
from checks import ASKED, MODEL, OPENAI, check
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


chat = {"model": MODEL, "api_base": OPENAI, "api_key": "none", "is_chat_model": True, "context_window": 8192}
model = OpenAILike(**chat)
tools = OpenAILike(**chat, is_function_calling_model=True)
strict = OpenAILike(**chat, should_use_structured_outputs=True)
check("chat", lambda: model.chat([ChatMessage(role="user", content=ASKED)]).message.content)
check("stream", lambda: "".join(each.delta or "" for each in model.stream_complete(ASKED)))
check("structured, tools", lambda: tools.as_structured_llm(Person).complete(ASKED).raw)
check("structured, schema", lambda: strict.as_structured_llm(Person).complete(ASKED).raw)
check(
    "embeddings",
    lambda: OpenAILikeEmbedding(model_name=MODEL, api_base=OPENAI, api_key="none").get_text_embedding("a"),
)
