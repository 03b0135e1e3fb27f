"""Print docs/cli.md, made from the commands themselves.

python scripts/make_cli_docs.py > docs/cli.md
"""

from blendserve.cli.reference import page

if __name__ == "__main__":
    print(page(), end="")
