# /// script
# dependencies = ["smolagents[openai]"]
# ///
from checks import ASKED, MODEL, OPENAI, check
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent


class Save(Tool):
    name, description, output_type = "save", "Saves an age.", "string"
    inputs = {"age": {"type": "integer", "description": "The age."}}

    def forward(self, age: int) -> str:
        return "saved"


model = OpenAIServerModel(model_id=MODEL, api_base=OPENAI, api_key="none")
said = [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]
check("generate", lambda: model.generate(said).content)
check("tool_choice required", lambda: model.generate(said, tools_to_call_from=[Save()]).tool_calls)
check(
    "ToolCallingAgent", lambda: ToolCallingAgent(tools=[Save()], model=model, max_steps=1).run(ASKED) or True
)
