"""Old names of tests/support/http.py, for other folders."""

from tests.support.http import DOCUMENTS as DOCUMENTS
from tests.support.http import Server as Server
from tests.support.http import bearer as bearer
from tests.support.http import index as index
