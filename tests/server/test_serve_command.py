"""`metalctl serve` as a process: how it starts, says so, and stops."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from metalctl.cli import main
from metalctl.engine.errors import StorageError, UsageError
from metalctl.server.durations import FOR_EVER, parse_seconds
from metalctl.server.launch import keys, parse_size

PROGRAM = Path(__file__).with_name("tiny_server.py")


class Server:
    """The program with `arguments`; `url` once it listens."""

    def __init__(self, *arguments: str, delay: float = 0.0):
        command = [sys.executable, str(PROGRAM), str(delay), "serve", "--port", "0", "--json", *arguments]
        path = os.pathsep.join(str(PROGRAM.parents[1] / folder) for folder in ("engine", "server"))
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        assert self.process.stdout
        self.first = json.loads(self.process.stdout.readline())
        self.url = self.first["url"]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def test_running_requests_finish_and_new_ones_are_not_taken_after_sigterm():
    with Server("tiny", "--served-name", "t", delay=0.02) as server:
        assert server.first["models"] == ["t"]
        answers = []
        asked = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}

        def ask():
            answers.append(httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        while 'running{model="t"} 1.0' not in httpx.get(f"{server.url}/metrics").text:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        output, errors = server.process.communicate(timeout=30)
        assert server.process.returncode == 0
        assert json.loads(output.splitlines()[-1])["event"] == "done"
        assert b"Traceback" not in errors
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")


def test_requests_that_take_too_long_are_ended_at_the_drain_timeout():
    with Server("tiny", "--drain-timeout", "1", delay=0.2) as server:
        began = []

        def ask():
            began.append(True)
            with contextlib.suppress(httpx.TransportError):
                httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1000}, timeout=60)

        thread = threading.Thread(target=ask)
        thread.start()
        while "running{" not in httpx.get(f"{server.url}/metrics").text or not began:
            time.sleep(0.02)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        server.process.communicate(timeout=20)
        assert server.process.returncode == 0
        thread.join()


def run(capsys, *arguments) -> tuple[int, str]:
    code = main(["serve", *arguments])
    return code, capsys.readouterr().err


def test_what_must_come_before_mlx_does():
    """An OpenBLAS that is loaded after it has no effect."""
    program = (
        "import sys\nfrom metalctl import cli\nfrom metalctl.kernels import blas\n"
        "blas.preload = lambda: print('mlx.core' in sys.modules)\n"
        "cli.main(['serve', 'no-such-alias', '--port', '0'])\nprint('mlx.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[0] == "False"
    assert done.stdout.split()[-1] == "True"


def test_other_machines_are_not_served_without_a_key(capsys):
    code, said = run(capsys, "x", "--host", "0.0.0.0")
    assert code == 2
    assert "no API key" in said
    assert "--no-auth" in said


def test_port_that_is_taken_is_said_before_anything_is_loaded(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, said = run(capsys, "x", "--port", str(other.getsockname()[1]))
    assert code == 1
    assert "cannot listen" in said
    assert "--port" in said


def test_unknown_pin_and_surplus_names_are_refused(capsys):
    assert run(capsys, "x", "--pin", "y")[0] == 2
    assert run(capsys, "x", "--served-name", "a", "--served-name", "b")[0] == 2
    assert run(capsys, "x", "y", "--served-name", "n", "--served-name", "n")[0] == 2


def test_keys_come_from_options_and_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n second \n")
    assert keys(["zero"], path) == ("zero", "first", "second")
    path.write_text("\n# none\n")
    with pytest.raises(UsageError):
        keys([], path)
    with pytest.raises(StorageError):
        keys([], tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300),
        ("90s", 90),
        ("1h30m", 5400),
        ("300", 300),
        ("0", 0),
        ("-1", FOR_EVER),
        ("1.5s", 1.5),
        ("99999999999h", FOR_EVER),
    ],
)
def test_times_are_read(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "m", "1h-"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError):
        parse_seconds(text)


def test_sizes_are_read():
    assert (parse_size("32MB"), parse_size("1.5 GiB"), parse_size("10")) == (32_000_000, 3 * 2**29, 10)
    with pytest.raises(UsageError):
        parse_size("large")
