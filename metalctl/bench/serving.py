"""A server under load: many clients at once, each sending its next request when the last is answered."""

import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

from metalctl.bench.peers import PeerError
from metalctl.engine.errors import UsageError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.kernels.cores import usable_cores

START_LIMIT = 300.0  # seconds for a server to load its model
REQUEST_LIMIT = 600.0  # seconds without a byte
VOCABULARY = 1000  # random tokens are below: every model has at least so many


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` requests from `concurrency` clients: `prompt` random tokens each, the first `shared` the same in all,
    and `generate` tokens to write."""

    concurrency: int
    requests: int
    prompt: int
    generate: int
    shared: int = 0


@dataclass(slots=True)
class Answer:
    """Seconds from sending a request to each piece of its answer, and how many tokens that were."""

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A server that speaks OpenAI's completions."""

    url: str
    model: str
    key: str | None = None
    process: psutil.Process | None = None  # where it is ours


def sweep(
    runtime: str, target: Target, loads: list[Load], seed: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every level in turn, as records, after a request that does not count."""
    ask(target, [1] * 8, 2)
    records = []
    for index, load in enumerate(loads):
        progress(f"{runtime}: {load.concurrency} clients, {load.requests} requests")
        records.append(run(runtime, target, load, seed + index))
    return records


def add_ratios(records: list[dict[str, Any]]) -> None:
    """Into the records of peers: how many times their throughput this program has."""
    ours = {r["concurrency"]: r["output_tokens_per_second"] for r in records if r["runtime"] == "metalctl"}
    for record in records:
        if record["runtime"] != "metalctl":
            record["ratio"] = ours[record["concurrency"]] / record["output_tokens_per_second"]


def run(runtime: str, target: Target, load: Load, seed: int) -> dict[str, Any]:
    """One level of load, as a record. Raises PeerError when no request at all was answered."""
    rng = random.Random(seed)
    beginning = [rng.randrange(VOCABULARY) for _ in range(load.shared)]
    rest = load.prompt - load.shared
    prompts = [beginning + [rng.randrange(VOCABULARY) for _ in range(rest)] for _ in range(load.requests)]
    answers: list[Answer] = []
    waiting = iter(prompts)
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                prompt = next(waiting, None)
            if prompt is None:
                return
            answer = ask(target, prompt, load.generate)
            with lock:
                answers.append(answer)

    with _peak_memory(target.process) as peak:
        start = time.perf_counter()
        clients = [threading.Thread(target=client, daemon=True) for _ in range(load.concurrency)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        seconds = time.perf_counter() - start
    return summary(runtime, load, answers, seconds) | {"peak_memory": peak()}


def summary(runtime: str, load: Load, answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Throughput over the whole level, and the spread of waiting times in seconds."""
    good = [answer for answer in answers if answer.error is None and answer.arrivals]
    if not good:
        error = next((answer.error for answer in answers if answer.error), "nothing was answered")
        raise PeerError(f"{runtime}: every request failed: {error}")
    tokens = sum(answer.tokens for answer in good)
    first = sorted(answer.arrivals[0] for answer in good)
    gaps = sorted(b - a for answer in good for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False))
    return {
        "runtime": runtime,
        "concurrency": load.concurrency,
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "prompt": load.prompt,
        "generate": load.generate,
        "shared": load.shared,
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        **{f"ttft_{name}": percentile(first, share) for name, share in _SHARES.items()},
        **{f"itl_{name}": percentile(gaps, share) for name, share in _SHARES.items()},
        "ratio": None,
    }


_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def percentile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed (nearest rank)."""
    if not ordered:
        return None
    return ordered[max(0, -(-int(share * len(ordered) * 1000) // 1000) - 1)]


def ask(target: Target, prompt: list[int], generate: int) -> Answer:
    """Send one request and read its stream to the end."""
    answer = Answer()
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": generate,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        with _connection(target) as connection:
            start = time.perf_counter()
            connection.request("POST", _path(target, "/v1/completions"), json.dumps(body), _headers(target))
            response = connection.getresponse()
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
                return answer
            for event in events(response):
                if event.get("error"):
                    answer.error = str(event["error"])
                if event.get("choices"):
                    answer.arrivals.append(time.perf_counter() - start)
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    for line in response:
        text = line.decode().strip()
        if not text.startswith("data:"):
            continue
        data = text[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def find(url: str, key: str | None) -> Target:
    """The server at `url`, with the first model that it offers."""
    url = url.rstrip("/").removesuffix("/v1")
    target = Target(url, "", key)
    try:
        with _connection(target) as connection:
            connection.request("GET", _path(target, "/v1/models"), headers=_headers(target))
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise PeerError(
                    f"{url} answers HTTP {response.status}.", "Give its key with --api-key." if not key else None
                )
            models = json.loads(content)["data"]
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise PeerError(f"there is no OpenAI server at {url}: {error}", "`metalctl serve REF` starts one.") from error
    if not models:
        raise PeerError(f"{url} offers no model.")
    return Target(url, models[0]["id"], key)


@contextmanager
def own_server(checkpoint: Checkpoint, loads: list[Load], trust_remote_code: bool) -> Iterator[Target]:
    port = free_port()
    command = [sys.executable, "-m", "metalctl", "serve", str(checkpoint.path), "--port", str(port), "--offline"]
    command += ["--context", str(_context(loads)), "--max-num-seqs", str(_most(loads)), "--max-queue", "4096"]
    command += ["--trust-remote-code"] if trust_remote_code else []
    with _server("metalctl", command, port) as target:
        yield target


@contextmanager
def llama_server(checkpoint: Checkpoint, loads: list[Load]) -> Iterator[Target]:
    """llama.cpp's server with a slot for each client. Raises PeerError or UsageError where it cannot run."""
    if checkpoint.format != "gguf":
        raise UsageError("llama.cpp reads GGUF files only.", "Bench a GGUF model, or leave out --compare llama.cpp.")
    program = shutil.which("llama-server")
    if program is None:
        raise PeerError("llama-server is not on the PATH.", "Install llama.cpp, or leave out --compare llama.cpp.")
    port = free_port()
    command = [program, "-m", str(checkpoint.path), "--port", str(port), "-np", str(_most(loads))]
    command += ["-c", str(_context(loads) * _most(loads)), "-t", str(usable_cores())]
    with _server("llama.cpp", command, port) as target:
        yield target


def _most(loads: list[Load]) -> int:
    return max(load.concurrency for load in loads)


def _context(loads: list[Load]) -> int:
    """Tokens of the longest sequence, and some to spare."""
    return max(load.prompt + load.generate for load in loads) + 64


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _server(name: str, command: list[str], port: int) -> Iterator[Target]:
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=dict(os.environ))
        try:
            url = f"http://127.0.0.1:{port}"
            _await(name, url, process, said)
            target = find(url, None)
            yield Target(url, target.model, process=psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await(name: str, url: str, process: "subprocess.Popen[bytes]", said: Any) -> None:
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        if process.poll() is not None:
            said.seek(0)
            lines = said.read().strip().splitlines()
            raise PeerError(
                f"{name}'s server ended at once: {lines[-1] if lines else f'exit code {process.returncode}'}"
            )
        try:
            with _connection(Target(url, "")) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise PeerError(f"{name}'s server was not ready within {START_LIMIT:.0f} s.")


@contextmanager
def _connection(target: Target) -> Iterator[http.client.HTTPConnection]:
    parts = urlsplit(target.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=REQUEST_LIMIT)
    try:
        yield connection
    finally:
        connection.close()


def _path(target: Target, path: str) -> str:
    return urlsplit(target.url).path.rstrip("/") + path


def _headers(target: Target) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return headers | ({"Authorization": f"Bearer {target.key}"} if target.key else {})


@contextmanager
def _peak_memory(process: psutil.Process | None) -> Iterator[Any]:
    """Watches resident memory while the block runs; yields what gives the largest in bytes, None without a process."""
    sizes: list[int] = []
    done = threading.Event()

    def watch() -> None:
        assert process is not None
        while not done.wait(0.05):
            try:
                sizes.append(process.memory_info().rss)
            except psutil.NoSuchProcess:
                return

    watcher = threading.Thread(target=watch, daemon=True)
    if process is not None:
        watcher.start()
    try:
        yield lambda: max(sizes, default=None)
    finally:
        done.set()


def plan(levels: list[int], requests: int | None, prompt: int, generate: int, shared: int) -> list[Load]:
    """The levels of a sweep; by default four rounds of every client. Raises UsageError."""
    if shared > prompt - 1:
        raise UsageError(f"--shared-prefix {shared} leaves nothing of a prompt of {prompt} tokens.")
    return [Load(level, requests or 4 * level, prompt, generate, shared) for level in levels]
