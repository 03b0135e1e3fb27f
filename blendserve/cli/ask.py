"""`blendserve ask`."""

from __future__ import annotations

from typing import Annotated

import typer

from blendserve import console
from blendserve.cli.collecting import collecting_later
from blendserve.cli.options import IndexOpt, JsonOpt, Options, make_app, with_options
from blendserve.config import Config
from blendserve.errors import InputError

app = make_app()


@app.command()
@with_options(
    settings=Options(
        Config(),
        "model.name",
        "retrieve.top_k",
        "blend.method",
        "blend.policy",
        "blend.ratio",
        "blend.correction",
        "blend.near",
        "decode.max_new_tokens",
        "decode.temperature",
        "decode.top_p",
        "decode.seed",
        "decode.stop",
        load=Config.load,
        verbatim=("stop",),
    )
)
def ask(
    question: Annotated[str, typer.Argument(help="Question to answer from the retrieved passages.")],
    settings: Config,
    index: IndexOpt = "indexes/demo",
    json: JsonOpt = False,
) -> None:
    """Answer a question from an index.

    The answer is streamed. Its sources, the numbers of reused and recomputed tokens, and the time to first token follow.
    """
    if not question.strip():
        raise InputError("the question is empty: ask something")
    with collecting_later():
        from blendserve.demo import print_sources  # torch and all the rest: seconds
        from blendserve.engine.engine import Engine
        from blendserve.kdn.pull import resolve

        index, settings = resolve(index, settings)
        opened = Engine.open(index, settings)
    with opened as engine:
        stream = engine.stream(question)
        if json:
            console.print_json(stream.answer().to_dict())
            return
        for piece in stream:
            console.out.print(piece, end="", markup=False)
        print_sources(stream.answer())
