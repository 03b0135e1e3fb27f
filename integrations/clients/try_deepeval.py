# /// script
# dependencies = ["deepeval"]
# ///
import os

os.environ |= {"DEEPEVAL_TELEMETRY_OPT_OUT": "YES", "DEEPEVAL_DISABLE_TIMEOUTS": "1"}
from checks import ASKED, MODEL, OPENAI, check
from deepeval.metrics import AnswerRelevancyMetric, GEval
from deepeval.models import LocalModel
from deepeval.test_case import LLMTestCase, LLMTestCaseParams
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


def form_of(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def model(schema=None):
    """A judge; deepeval puts a schema in words into its prompt, and the server holds the model to it."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    options = {"response_format": form} if schema else {}
    return LocalModel(MODEL, "none", OPENAI, generation_kwargs=options)


def score(metric):
    case = LLMTestCase(input=ASKED, actual_output="She is Ann, 31 years old.", expected_output="Ann, 31.")
    return 0 <= metric.measure(case, _show_indicator=False) <= 1 and metric.reason


text = {"type": "string", "maxLength": 80}
judged = form_of(reason=text, score={"type": "integer", "minimum": 0, "maximum": 10})
verdict = form_of(verdict={"enum": ["yes", "no", "idk"]}, reason=text)
some = {"type": "array", "minItems": 1, "maxItems": 2}
steps = [
    form_of(statements={**some, "items": text}),
    form_of(verdicts={**some, "items": verdict}),
    form_of(reason=text),
]
fields = [LLMTestCaseParams.ACTUAL_OUTPUT, LLMTestCaseParams.EXPECTED_OUTPUT]
relevancy = AnswerRelevancyMetric(model=model({"anyOf": steps}), async_mode=False)
check("generate", lambda: model().generate(ASKED)[0])
check("generate, schema", lambda: model(Person.model_json_schema()).generate(ASKED, Person)[0].age >= 0)
check(
    "GEval",
    lambda: score(
        GEval(
            name="right",
            evaluation_steps=["Is the actual output the expected one?"],
            evaluation_params=fields,
            model=model(judged),
            async_mode=False,
        )
    ),
)
check("AnswerRelevancyMetric", lambda: score(relevancy))
