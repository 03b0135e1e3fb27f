"""The former place of tests/support/valkey.py."""

from tests.support.valkey import needs_server as needs_server
from tests.support.valkey import settings as settings
from tests.support.valkey import store_at as store_at
