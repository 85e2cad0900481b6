"""bench: what is measured, how it is printed, and what a server under load is asked."""

import csv
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from metalctl.bench import serving
from metalctl.bench.cells import Cell, Plan, Result, matrix, numbers, ratios
from metalctl.bench.machine import describe
from metalctl.bench.matrix import run
from metalctl.bench.own import OwnRuntime
from metalctl.bench.peers import PeerError, open_peer
from metalctl.bench.report import bars, render
from metalctl.cli import main
from metalctl.engine.errors import UsageError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.output import Output


@pytest.mark.parametrize(
    ("text", "expected"), [("128", [128]), ("0", [0]), ("1,8, 32", [1, 8, 32]), ("2-4,3", [2, 3, 4])]
)
def test_numbers_are_read(text: str, expected: list[int]) -> None:
    assert numbers(text, "--prompt") == expected


@pytest.mark.parametrize("text", ["", "x", "1,,2", "-1", "4-2", "1-9999999", "1.5"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--prompt"):
        numbers(text, "--prompt")


def test_the_matrix_is_every_combination() -> None:
    cells = matrix([128, 512], [32], [0, 1024], [1, 4])
    assert len(cells) == 3 * 2 * 2
    assert [cell.name for cell in cells[:4]] == ["pp128", "pp512", "tg32", "pp128 @ d1024"]
    assert cells[-1].name == "tg32 @ d1024 x 4"
    assert cells[-1].tokens == 128
    assert matrix([0], [16], [0], [1]) == [Cell(0, 16)]


def test_an_empty_or_too_long_plan_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        Plan([], 1, False, [], 0)
    plan = Plan([Cell(512, 0, depth=1000)], 1, False, [], 0)
    plan.check(1513)
    with pytest.raises(UsageError, match="1513"):
        plan.check(1512)


def results() -> list[Result]:
    cells = [Cell(8, 0), Cell(0, 4)]
    return [
        Result("metalctl", cells[0], [100.0, 120.0]),
        Result("mlx-lm", cells[0], [10.0, 12.0]),
        Result("metalctl", cells[1], [50.0]),
        Result("mlx-lm", cells[1], missing="it cannot"),
    ]


def test_ratios_are_ours_by_theirs_in_the_same_cell() -> None:
    assert ratios(results(), "metalctl") == [None, 10.0, None, None]
    first = results()[0]
    assert first.mean == 110
    assert first.deviation == pytest.approx(14.142, abs=1e-3)
    assert results()[2].deviation is None


def records() -> list[dict[str, Any]]:
    return [result.record(ratio) for result, ratio in zip(results(), ratios(results(), "metalctl"), strict=True)]


def test_every_form_holds_the_same_figures() -> None:
    machine = describe()
    table = render("md", machine, records())
    assert "| metalctl | pp8  | 110.0 |" in table
    assert "it cannot" in table
    assert "10.00" in table
    assert json.loads(render("json", machine, records()))["results"] == records()
    lines = [json.loads(line) for line in render("jsonl", machine, records()).splitlines()]
    assert [line["test"] for line in lines] == ["pp8", "pp8", "tg4", "tg4"]
    assert lines[0]["machine"]["cores"] >= 1
    rows = list(csv.DictReader(io.StringIO(render("csv", machine, records()))))
    assert rows[1]["ratio"] == "10.0"
    assert rows[0]["rounds"] == "100.0 120.0"


def test_bars_are_as_long_as_their_share() -> None:
    drawn = bars(records(), "tokens_per_second", "{test} {runtime}").splitlines()
    assert [line.count("█") for line in drawn] == [40, 4, 18]
    assert drawn[0].endswith("110")
    assert bars([], "tokens_per_second", "") == ""


class CountingRuntime:
    name = "metalctl"

    def __init__(self) -> None:
        self.asked: list[Cell] = []

    def seconds(self, cell: Cell) -> float:
        self.asked.append(cell)
        return len(self.asked)

    def close(self) -> None:
        self.asked.append(Cell(0, 0))


def test_the_warm_up_does_not_count_and_rounds_alternate() -> None:
    runtime = CountingRuntime()
    plan = Plan([Cell(8, 0), Cell(0, 4)], 2, True, [], 0)
    first, second = run(plan, runtime, None, Output(quiet=True))  # type: ignore[arg-type]
    assert first.values == [8 / 3, 8 / 5]
    assert second.values == [4 / 4, 4 / 6]
    assert runtime.asked[-1] == Cell(0, 0)


def test_a_peer_that_cannot_run_says_why(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    with pytest.raises(UsageError, match="GGUF"):
        open_peer("llama.cpp", Checkpoint("x", "mlx", model, ()), 64)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("metalctl.bench.peers.find_spec", lambda name: None)
    with pytest.raises(PeerError, match="not installed"):
        open_peer("llama.cpp", Checkpoint("x", "gguf", model, (model,)), 64)
    with pytest.raises(PeerError, match="mlx-lm failed"):
        open_peer("mlx-lm", Checkpoint("x", "gguf", model, (model,)), 64)


def test_llama_bench_is_asked_for_the_cell(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-bench"
    program.write_text('#!/bin/sh\necho "$@" > "$LOG"\necho \'[{"avg_ns": 2000000000}]\'\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    model = tmp_path / "m.gguf"
    peer = open_peer("llama.cpp", Checkpoint("x", "gguf", model, (model,)), 64)
    assert peer.seconds(Cell(128, 0, depth=16)) == 2.0
    assert "-p 128 -n 0 -d 16" in (tmp_path / "log").read_text()


# -- serving


class Handler(BaseHTTPRequestHandler):
    """Answers with as many events as tokens were asked for; every fifth request fails when `failing`."""

    requests: list[dict[str, Any]] = []
    failing = False

    def do_GET(self) -> None:
        self._json({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        if self.failing and len(self.requests) % 5 == 0:
            return self.send_error(503)
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self._event({"choices": [{"text": "x"}]})
        self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b": keep-alive\n\ndata: " + json.dumps(event).encode() + b"\n\n")

    def _json(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.requests, Handler.failing = [], False
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


def test_a_level_sends_its_requests_with_new_prompts(server: str) -> None:
    target = serving.find(server + "/v1", None)
    assert target.model == "tiny"
    loads = serving.plan([1, 4], None, prompt=10, generate=3, shared=4)
    found = serving.sweep("metalctl", target, loads, 0, lambda line: None)
    assert [(r["concurrency"], r["requests"], r["failed"]) for r in found] == [(1, 4, 0), (4, 16, 0)]
    sent = [request["prompt"] for request in Handler.requests[1:]]
    assert len({tuple(prompt) for prompt in sent}) == 20
    assert len({tuple(prompt[:4]) for prompt in sent[4:]}) == 1
    assert all(len(prompt) == 10 for prompt in sent)
    assert all(request["ignore_eos"] for request in Handler.requests)
    assert found[0]["output_tokens_per_second"] > 0
    assert found[0]["ttft_p50"] <= found[0]["ttft_p99"]
    assert found[0]["itl_p50"] is not None


def test_failures_are_counted_and_all_of_them_are_an_error(server: str) -> None:
    Handler.failing = True
    target = serving.find(server, None)
    (level,) = serving.sweep("metalctl", target, serving.plan([2], 10, 5, 2, 0), 0, lambda line: None)
    assert level["failed"] == 2
    with pytest.raises(PeerError, match="every request failed"):
        serving.summary("x", serving.Load(1, 1, 1, 1), [serving.Answer(error="HTTP 500")], 1.0)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [serving.percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert serving.percentile([3.0], 0.99) == 3
    assert serving.percentile([], 0.5) is None


def test_ratios_of_servers_are_by_level() -> None:
    found = [
        {"runtime": "metalctl", "concurrency": 1, "output_tokens_per_second": 30.0, "ratio": None},
        {"runtime": "llama.cpp", "concurrency": 1, "output_tokens_per_second": 20.0, "ratio": None},
    ]
    serving.add_ratios(found)
    assert [record["ratio"] for record in found] == [None, 1.5]


def test_no_server_and_a_wrong_prefix_are_said() -> None:
    with pytest.raises(PeerError, match="no OpenAI server"):
        serving.find(f"http://127.0.0.1:{serving.free_port()}", None)
    with pytest.raises(UsageError, match="leaves nothing"):
        serving.plan([1], None, prompt=10, generate=3, shared=10)


# -- the command


def test_a_running_server_is_measured_by_the_command(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", server, "--concurrency", "2", "-p", "6", "-n", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["results"][0]["requests"] == 8
    assert data["machine"]["chip"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x.gguf", "-p", "a"], "--prompt"),
        (["x.gguf", "--compare", "vllm"], "no such peer"),
        (["x.gguf", "-p", "0", "-n", "0"], "nothing to measure"),
        (["x.gguf", "--concurrency", "1,2", "-p", "1,2"], "one number"),
        (["x.gguf", "--url", "http://127.0.0.1:1", "--compare", "llama.cpp"], "--compare"),
    ],
)
def test_wrong_use_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_our_own_engine_is_measured() -> None:
    from metalctl.engine.config import EngineConfig
    from metalctl.engine.engine_thread import EngineThread
    from metalctl.engine.llm_engine import LLMEngine
    from tests.engine import tiny

    config = EngineConfig(max_num_seqs=4, kv_cache_bytes=1 << 26, block_size=8)
    thread = EngineThread.start(lambda: LLMEngine(tiny.load(tiny.build("llama")), config))
    try:
        runtime = OwnRuntime(thread, seed=0)
        for cell in (Cell(40, 0), Cell(0, 5), Cell(24, 0, depth=32), Cell(0, 5, depth=32), Cell(0, 4, batch=3)):
            assert 0 < runtime.seconds(cell) < 60
        stats = thread.call(lambda engine: engine.stats())
        assert stats.cached_tokens == 32  # the past of the one cell that reads behind it
        assert not thread.call(lambda engine: engine.has_work)
    finally:
        thread.close()
