# /// script
# dependencies = ["litellm"]
# ///
import litellm
from checks import ASKED, MODEL, OPENAI, PERSON, URL, check

own = {"model": f"openai/{MODEL}", "api_base": OPENAI, "api_key": "none"}
said = [{"role": "user", "content": ASKED}]
form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
check("chat", lambda: litellm.completion(**own, messages=said).choices[0].message.content)
check("stream", lambda: [*litellm.completion(**own, messages=said, stream=True)])
check(
    "response_format",
    lambda: (
        litellm.completion(**own, messages=said, response_format=form).choices[0].message.content[0] == "{"
    ),
)
check("embedding", lambda: litellm.embedding(**own, input=["a"]).data[0]["embedding"])
check("responses", lambda: litellm.responses(**own, input=ASKED).output)
check(
    "anthropic",
    lambda: (
        litellm.completion(
            model=f"anthropic/{MODEL}", api_base=URL, api_key="none", messages=said, max_tokens=20
        )
        .choices[0]
        .message.content
    ),
)
