"""The load generator tells the truth, and the server stands what it brings."""

import asyncio
import gc
import http.server
import math
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from load import Load, drive, percentile, prompt
from scripted import ScriptedThread
from serving import assert_idle, running, served, tiny_engine


def test_what_a_server_is_known_to_do_is_what_is_seen():
    thread = ScriptedThread("abcdefghij", size=2)
    thread.pause = 0.05
    with running(lambda spec: served("s", thread), "s") as server:
        outcome, samples = asyncio.run(drive(server.url, Load(requests=6, concurrency=3, output_tokens=10)))
    assert outcome.failures == 0
    assert outcome.output_tokens == 60
    assert all(sample.text == "abcdefghij" for sample in samples)
    assert 0.05 <= outcome.time_to_first_token.p50 < 1
    assert 0.04 <= outcome.between_tokens.p50 < 0.2
    assert outcome.elapsed >= 2 * 5 * 0.05
    assert outcome.output_per_second == pytest.approx(60 / outcome.elapsed)


def test_prompts_share_no_beginning_and_come_again():
    load = Load(requests=20, concurrency=1)
    prompts = [prompt(load, index) for index in range(20)]
    assert len({text[:20] for text in prompts}) == 20
    assert prompts == [prompt(load, index) for index in range(20)]


def test_percentiles():
    values = [float(value) for value in range(101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert math.isnan(percentile([], 0.5))


class Broken(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_error(500)

    def log_message(self, *_):
        pass


def test_an_http_error_is_a_failure():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    program = Path(__file__).with_name("load.py")
    command = [sys.executable, str(program), url, "--concurrency", "2", "--requests", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    server.shutdown()
    assert done.returncode == 1
    assert '"failures": 2' in done.stdout


def test_an_error_in_a_stream_is_a_failure():
    with running(lambda spec: served("s", ScriptedThread(RuntimeError("x"))), "s") as server:
        outcome, _ = asyncio.run(drive(server.url, Load(requests=1, concurrency=1)))
    assert outcome.failures == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_hours_of_requests_leave_memory_flat():
    """As many as eight streams of a small model on two cores get done in four hours: about one a second."""
    with running(lambda spec: served("s", tiny_engine(max_num_seqs=16)), "s") as server:

        def serve(count: int, seed: int) -> int:
            load = Load(requests=count, concurrency=16, prompt_words=4, output_tokens=6, seed=seed)
            outcome, _ = asyncio.run(drive(server.url, load))
            assert outcome.failures == 0
            assert_idle(server)
            gc.collect()
            return psutil.Process().memory_info().rss

        serve(2000, seed=0)
        before = serve(400, seed=1)
        after = serve(12_000, seed=2)
        assert after - before < 30 << 20
