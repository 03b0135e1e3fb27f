"""Whatever clients do, and whenever, nothing is left of their requests: no slot, hold, transfer, job, task or thread."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.support.lives import ASKS, ServerMachine

TestServer = ServerMachine.TestCase
TestServer.settings = settings(stateful_step_count=15)


@pytest.mark.parametrize("how", ["leaves", "cancelled"])
def test_a_client_that_leaves_while_its_request_is_prepared_holds_nothing(how: str) -> None:
    machine = ServerMachine()
    machine.open(is_open=False)
    for tenant in "abc":
        machine.ask(ASKS[0], tenant, how=how)
    machine.turn_gate(is_open=True)
    machine.step()
    machine.teardown()
