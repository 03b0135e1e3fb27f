"""The command line, one file a group of commands: each parses, calls and prints; all logic is in the package.

app.py      the file of each command, errors to exit codes            options.py    settings as options
index.py  precompute.py  ask.py  store.py                             show.py       results as text or JSON
evaluate.py  bench.py  doctor.py  demo.py  serve.py  keys.py          reference.py  pages of docs/reference
"""

from blendserve.cli.app import main

__all__ = ["main"]
