"""The former place of the builders in tests/support/stores.py."""

from tests.support.stores import BIG as BIG
from tests.support.stores import CAP as CAP
from tests.support.stores import chunk as chunk
from tests.support.stores import flip as flip
from tests.support.stores import key_of as key_of
from tests.support.stores import read as read
from tests.support.stores import same as same
from tests.support.stores import tamper as tamper
