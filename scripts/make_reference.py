"""Write the generated pages of docs/reference: commands and settings.

python scripts/make_reference.py
"""

from __future__ import annotations

from pathlib import Path

from blendserve.cli.reference import pages

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

if __name__ == "__main__":
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
