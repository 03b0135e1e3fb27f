"""The former place of tests/support/codecs.py."""

from tests.support.codecs import Toy as Toy
