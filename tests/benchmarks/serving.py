"""Puts one load on `metalctl serve` and on mlx-lm's server, on the same weights, in turn:
python tests/benchmarks/serving.py [--write]

Chats, since both answer those; the end of sequence is biased away, so that every answer has its full length. Prompts
are new in each round. With --write the figures go into docs/performance.md. Run it while nothing else runs.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from load import Load, Outcome, drive

from metalctl.bench.machine import describe
from metalctl.bench.serving import free_port
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.resolve import resolve

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- serving: begin -->", "<!-- serving: end -->"
HEADER = (
    "| streams | server | tokens/s | TTFT p50 | p95 | p99 | between tokens p50 | p95 | p99 | failed |\n"
    + "| --- " * 10
    + "|"
)


def export(checkpoint: Checkpoint, folder: Path) -> list[int]:
    """The model as a folder that mlx-lm loads, with the weights as they are. Its end-of-sequence tokens."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from metalctl.engine.models.loader import load

    loaded = load(checkpoint)
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    ends = sorted(loaded.tokenizer.eos_token_ids)
    config = {**loaded.config, "quantization": _quantization(weights), "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config))
    loaded.tokenizer.backend.save(str(folder / "tokenizer.json"))
    name = loaded.tokenizer.backend.id_to_token
    template = loaded.tokenizer.chat_templates.sources["default"]
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name(ends[0]), "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return ends


def _quantization(weights: dict[str, Any]) -> dict[str, Any]:
    """Bits and group size of each layer, as mlx-lm's configurations have them."""
    layers = {}
    for name, scales in weights.items():
        if name.endswith(".scales"):
            layer = name.removesuffix(".scales")
            packed = weights[f"{layer}.weight"].shape[-1] * 32  # bits of a row
            layers[layer] = {"group_size": 32, "bits": packed // (scales.shape[-1] * 32)}
    return {**next(iter(layers.values())), **layers}


@contextmanager
def server(*command: str) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, "-m", *command, "--port", str(port)], stdout=said, stderr=said)
        try:
            url = f"http://127.0.0.1:{port}"
            _await(f"{url}/v1/models", process)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


def _await(url: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"a server ended with {process.returncode}")
        try:
            urllib.request.urlopen(url, timeout=5).read()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("a server does not start")


def row(name: str, outcome: Outcome) -> str:
    first, between = outcome.time_to_first_token, outcome.between_tokens
    times = [f"{seconds:.2f} s" for seconds in (first.p50, first.p95, first.p99)]
    times += [f"{1000 * seconds:.0f} ms" for seconds in (between.p50, between.p95, between.p99)]
    cells = [str(outcome.concurrency), name, f"{outcome.output_per_second:.1f}", *times, str(outcome.failures)]
    return f"| {' | '.join(cells)} |"


def measure(levels: list[int], words: int, tokens: int, peer_until: int, say: Callable[[str], None]) -> list[str]:
    """The table's rows. mlx-lm's server is measured up to `peer_until` streams: it takes long."""
    checkpoint = resolve("smollm2")
    rows = []
    with tempfile.TemporaryDirectory() as place:
        ends = export(checkpoint, Path(place))
        extra = {"temperature": 0, "logit_bias": {str(token): -100 for token in ends}}
        with (
            server("metalctl", "serve", str(checkpoint.path)) as own,
            server("mlx_lm", "server", "--model", place) as peer,
        ):
            for number, level in enumerate(levels):
                for name, url in (("metalctl", own), ("mlx_lm.server", peer)):
                    if name != "metalctl" and level > peer_until:
                        continue
                    load = Load(2 * level, level, words, tokens, extra=extra, seed=number, timeout=3600)
                    rows.append(row(name, asyncio.run(drive(url, load))[0]))
                    say(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--words", type=int, default=100, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--peer-until", type=int, default=8, help="streams that mlx-lm's server gets at most")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    levels = [int(level) for level in arguments.concurrency.split(",")]

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    rows = measure(levels, arguments.words, arguments.tokens, arguments.peer_until, say)
    machine = describe()
    about = f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine['chip']}, {machine['cores']} cores, with `smollm2`: "
    about += f"prompts of {arguments.words} words, {arguments.tokens} tokens to come, two requests a stream."
    text = "\n".join([about, "", HEADER, *rows])
    sys.stdout.write(text + "\n")
    if arguments.write:
        document = DOCUMENT.read_text(encoding="utf-8")
        before, after = document.split(BEGIN)[0], document.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
