"""Old name of tests/support/http.py, for other folders."""

from tests.support.http import ToyServer as ToyServer
