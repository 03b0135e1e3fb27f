"""The command line: each command parses, calls and prints; all logic is in the package.

app.py      the file of each command, errors to exit codes     options.py    settings as options
core.py     demo, index, precompute, ask                       server.py     serve, keys
store.py    store, codec                                       kdn.py        kdn
research.py evaluate, simulate, cost, doctor                   bench.py      bench
reference.py  pages of docs/reference                         warm.py       warm (a vLLM server)
"""

from blendserve.cli.app import main

__all__ = ["main"]
