"""Other programs on the same weights, each in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from metalctl.bench.cells import Cell
from metalctl.engine.errors import MetalctlError, UsageError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.kernels.cores import usable_cores


class PeerError(MetalctlError):
    """A peer could not be started, or failed."""

    type = "peer"


class NotSupported(Exception):
    """The peer has no such measurement; the message says so."""


class Worker:
    """A process that measures the cells that it is sent, a JSON object a line, and answers in kind."""

    def __init__(self, name: str, module: str, start: dict[str, Any]):
        self.name = name
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._ask(start)

    def seconds(self, cell: Cell) -> float:
        answer = self._ask({"prompt": cell.prompt, "generate": cell.generate, "depth": cell.depth, "batch": cell.batch})
        if "missing" in answer:
            raise NotSupported(answer["missing"])
        return float(answer["seconds"])

    def close(self) -> None:
        self._process.communicate(timeout=30)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            _, said = self._process.communicate()
            last = said.strip().splitlines()[-1:] or ["it ended without a word"]
            raise PeerError(f"{self.name} failed: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class LlamaBench:
    """`llama-bench` of llama.cpp; each round starts it anew, and what it counts begins after loading."""

    name = "llama.cpp"

    def __init__(self, program: str, model: Path, threads: int | None):
        self._command = [program, "-m", str(model), "-o", "json", "-r", "1", "--no-warmup"]
        if threads is not None:
            self._command += ["-t", str(threads), "-ngl", "0"]

    def seconds(self, cell: Cell) -> float:
        if cell.batch > 1:
            raise NotSupported("llama-bench runs one sequence")
        test = ["-p", str(cell.prompt), "-n", str(cell.generate), "-d", str(cell.depth)]
        done = subprocess.run([*self._command, *test], capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise PeerError(f"llama-bench failed: {last[0]}")
        return float(json.loads(done.stdout)[0]["avg_ns"]) / 1e9

    def close(self) -> None:
        """Nothing runs between rounds."""


Runtime = Worker | LlamaBench


def open_peer(name: str, checkpoint: Checkpoint, context: int) -> Runtime:
    """The peer `mlx-lm` or `llama.cpp`, ready to measure. Raises UsageError or PeerError where it cannot run here."""
    return PEERS[name](checkpoint, context)


def _mlx_lm(checkpoint: Checkpoint, context: int) -> Runtime:
    files = [str(file) for file in checkpoint.files]
    start = {"format": checkpoint.format, "path": str(checkpoint.path), "files": files}
    return Worker("mlx-lm", "metalctl.bench.mlx_lm_worker", start)


def _llama_cpp(checkpoint: Checkpoint, context: int) -> Runtime:
    if checkpoint.format != "gguf":
        raise UsageError("llama.cpp reads GGUF files only.", "Compare with --compare mlx-lm, or bench a GGUF model.")
    threads = usable_cores() if sys.platform != "darwin" else None
    program = shutil.which("llama-bench")
    if program is not None:
        return LlamaBench(program, checkpoint.path, threads)
    if find_spec("llama_cpp") is None:
        raise PeerError(
            "llama.cpp is not installed.",
            "Put llama-bench on the PATH, or `pip install llama-cpp-python`, and try again.",
        )
    start = {"path": str(checkpoint.path), "threads": threads or os.cpu_count(), "context": context}
    return Worker("llama.cpp", "metalctl.bench.llama_cpp_worker", start)


PEERS: dict[str, Callable[[Checkpoint, int], Runtime]] = {"mlx-lm": _mlx_lm, "llama.cpp": _llama_cpp}
