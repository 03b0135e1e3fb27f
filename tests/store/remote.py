"""The former place of `RemoteStore`."""

from tests.support.stores import RemoteStore as RemoteStore
