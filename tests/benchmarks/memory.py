"""Resident memory of a model at work, against its file and the cache's budget: python tests/benchmarks/memory.py REF

REF is anything that `metalctl chat` takes. Eight prompts of 1,000 random tokens at once, 64 new tokens each, with a
cache that may take `--cache-bytes`. The bound is 1.3 times the file plus that budget.
"""

import argparse
import json
import random
import threading
import time

import psutil

from metalctl.app import Invocation
from metalctl.engine.config import EngineConfig
from metalctl.engine.sequence import SamplingParams
from metalctl.engine_start import running_engine
from metalctl.output import Output
from metalctl.settings import load_settings

PROCESS = psutil.Process()


def resident() -> int:
    return int(PROCESS.memory_info().rss)


class Peak(threading.Thread):
    """The most that this process had resident, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference")
    parser.add_argument("--cache-bytes", type=int, default=200_000_000)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    arguments = parser.parse_args()
    invocation = Invocation(output=Output(), offline=False, debug=False, settings=load_settings())
    rng = random.Random(0)
    empty = resident()
    peak = Peak()
    peak.start()
    with running_engine(invocation, arguments.reference, EngineConfig(kv_cache_bytes=arguments.cache_bytes)) as running:
        file = running.checkpoint.size
        loaded, while_loading = resident(), peak.bytes
        vocab = running.thread.engine.vocab_size
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        prompts = [[rng.randrange(100, vocab) for _ in range(arguments.tokens)] for _ in range(arguments.prompts)]
        streams = [running.thread.submit(prompt, params) for prompt in prompts]
        for stream in streams:
            list(stream)
    peak.ended = True
    bound = 1.3 * file + arguments.cache_bytes
    figures = {"file": file, "cache_budget": arguments.cache_bytes, "before": empty, "loading": while_loading,
               "loaded": loaded, "peak": peak.bytes, "bound": int(bound)}  # fmt: skip
    print(json.dumps({name: round(size / 1e6, 1) for name, size in figures.items()} | {"share": peak.bytes / bound}))


if __name__ == "__main__":
    main()
