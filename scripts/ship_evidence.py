"""Measure the bundled models on the demo's passages, and write the evidence that ships with the package.

    python -m scripts.ship_evidence --model smollm2-135m --prompts 40

It takes some seconds for each prompt. Run it again to go on where it stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from blendserve import console
from blendserve.demo import CHARACTERS, CONFIG, INDEX, open_demo
from blendserve.models.sources import BUNDLED
from blendserve.quality.evidence import PROMPTS, SHIPPED, read_shipped, write_shipped


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=BUNDLED, default=CONFIG.model.name, help="Bundled model")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="Number of prompts in all")
    parser.add_argument("--limit", type=int, help="Number of prompts to measure now")
    parser.add_argument("--index", type=Path, help="Folder of the demo's index")
    options = parser.parse_args()
    index = options.index or INDEX.with_name(f"demo-{options.model}")
    with (
        open_demo(index, options.model, CHARACTERS) as engine,
        console.progress("Measuring", "prompts") as measured,
    ):
        found = engine.calibrate(options.prompts, progress=measured, limit=options.limit)
        write_shipped(SHIPPED, {**read_shipped(SHIPPED), engine.quality.shipped_owner: found})
    print(f"{len(found.samples)} prompts of {options.model} in {SHIPPED}")


if __name__ == "__main__":
    main()
