import pytest
from serving import Running, assert_idle, running, served, tiny_engine


@pytest.fixture(scope="session")
def _tiny():
    with running(lambda spec: served(spec.name, tiny_engine()), "tiny") as server:
        server.client().post("/tokenize", json={"prompt": "x"}).raise_for_status()  # loads it
        yield server


@pytest.fixture
def tiny(_tiny: Running):
    """A random model behind a server, idle again after each test."""
    yield _tiny
    assert_idle(_tiny)
