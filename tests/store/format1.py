"""The former place of the writers in tests/support/damages.py."""

from tests.support.damages import encode_1 as encode  # noqa: F401
from tests.support.damages import make_store_of_format_1 as make_store  # noqa: F401
