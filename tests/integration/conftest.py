"""A real Prefect server for all integration tests."""

import pytest
from prefect.testing.utilities import prefect_test_harness

from tasks.blocks import Claim, HangWindow, Incident, TrainingRun


@pytest.fixture(scope="session", autouse=True)
def prefect_server():
    with prefect_test_harness(server_startup_timeout=240):
        for block in (TrainingRun, HangWindow, Incident, Claim):
            block.register_type_and_schema()
        yield
