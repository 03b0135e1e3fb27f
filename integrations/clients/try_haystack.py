# /// script
# dependencies = ["haystack-ai"]
# ///
from checks import ASKED, MODEL, OPENAI, PERSON, check
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.utils import Secret

own = {"api_base_url": OPENAI, "api_key": Secret.from_token("none"), "model": MODEL}
form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
said = [ChatMessage.from_user(ASKED)]
check("chat", lambda: OpenAIChatGenerator(**own).run(said)["replies"][0].text)
check(
    "response_format",
    lambda: (
        OpenAIChatGenerator(**own, generation_kwargs={"response_format": form})
        .run(said)["replies"][0]
        .text[0]
        == "{"
    ),
)
check("text embedder", lambda: OpenAITextEmbedder(**own).run("a")["embedding"])
check(
    "document embedder",
    lambda: OpenAIDocumentEmbedder(**own).run([Document(content="a")])["documents"][0].embedding,
)
