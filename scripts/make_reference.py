"""Write the generated part of the pages of docs/reference: commands and settings.

python scripts/make_reference.py
"""

from __future__ import annotations

from pathlib import Path

from blendserve.cli.reference import MARKER, pages

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

if __name__ == "__main__":
    for name, text in pages().items():
        page = REFERENCE / name
        page.write_text(f"{page.read_text().partition(MARKER)[0]}{MARKER}\n\n{text}")
