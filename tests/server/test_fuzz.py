"""Requests made up from the server's own description of itself: never a 5xx, and every answer as described."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import checks
from serving import assert_idle, running, served, tiny_engine

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def fuzzed():
    """Answers are short, so that many requests can be made."""
    with running(lambda spec: served("tiny", tiny_engine(max_model_len=96), slots=4096), "tiny") as server:
        server.client().post("/tokenize", json={"prompt": "x"})
        yield server


def fuzz(server, examples: int) -> int:
    """Requests of both kinds, right and wrong ones, to every route. How many there were."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    made = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            def ask(case):
                nonlocal made
                made += 1
                case.validate_response(case.call(timeout=60), checks=CHECKS)

            if operation.body or mode is schemathesis.GenerationMode.POSITIVE:
                ask()  # any name is a name: without a body nothing can be asked wrongly
    return made


def test_made_up_requests(fuzzed):
    assert fuzz(fuzzed, 5) > 100
    assert_idle(fuzzed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_made_up_requests(fuzzed):
    assert fuzz(fuzzed, 150) >= 2000
    assert_idle(fuzzed)
