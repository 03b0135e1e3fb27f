# /// script
# dependencies = ["dspy", "numpy"]
# ///
import dspy
from checks import ASKED, MODEL, OPENAI, check

own = {"api_base": OPENAI, "api_key": "none", "cache": False}
model = dspy.LM(f"openai/{MODEL}", **own)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
check("LM", lambda: model(ASKED)[0])
check("LM, n", lambda: len(model(ASKED, n=2, temperature=0.7)) == 2)
check("Predict, JSONAdapter", lambda: dspy.Predict("question -> name: str, age: int")(question=ASKED).name)
check(
    "Embedder",
    lambda: len(dspy.Embedder(f"openai/{MODEL}", api_base=OPENAI, api_key="none", caching=False)(["a"])) == 1,
)
