"""Types of the fields of requests, with their limits."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_ITEMS = 1000
MAX_TOOLS = 128  # as OpenAI's API has it
MAX_TOOL_NAME = 64  # characters; the same


def _reject_lone_surrogates(text: str) -> str:
    """Return a text. Raises ValueError for lone surrogates: JSON can write them and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a character (a lone surrogate)") from None
    return text


def json_text(value: Any) -> Any:
    """Return a JSON value. Raises ValueError for lone surrogates in its texts."""
    _reject_lone_surrogates(json.dumps(value, ensure_ascii=False))
    return value


def _refuse(value: Any) -> None:
    """Raise ValueError for an unsupported field that is set, as it would change the answer or its form."""
    if value is not None:
        raise ValueError("this field is not supported: leave it out")


def no_limit(value: Any) -> Any:
    """Return None for -1, which means no limit in llama.cpp and LM Studio."""
    return None if value == -1 else value


Refused = Annotated[None, BeforeValidator(_refuse)]
Text = Annotated[str, AfterValidator(_reject_lone_surrogates)]
JsonObject = Annotated[dict[str, Any], AfterValidator(json_text)]
Name = Annotated[Text, Field(min_length=1, max_length=512)]
Names = Annotated[list[Name], Field(max_length=MAX_ITEMS)]
ToolName = Annotated[Text, Field(min_length=1, max_length=MAX_TOOL_NAME)]
Label = Annotated[Text, Field(max_length=512)]
Tokens = Annotated[int, Field(ge=1)]
TokenLimit = Annotated[Tokens | None, BeforeValidator(no_limit)]
TokenId = Annotated[int, Field(ge=0)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]  # as in OpenAI's API
Stop = Annotated[Text, Field(min_length=1, max_length=200)]
Stops = Annotated[list[Stop], Field(max_length=MAX_ITEMS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
