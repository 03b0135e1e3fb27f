"""Moved to tests/support/pages.py; this goes when all tests import from there."""

from tests.support.pages import RECIPES, ROOT, SERVER, blocks, commands, name, parse

__all__ = ["RECIPES", "ROOT", "SERVER", "blocks", "commands", "name", "parse"]
