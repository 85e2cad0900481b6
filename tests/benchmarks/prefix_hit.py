"""Time to the first token of a long prompt, the first time and again: python tests/benchmarks/prefix_hit.py REF

REF is anything that `metalctl chat` takes. Each round uses a new random prompt; the second time only a few words at its
end differ.
"""

import argparse
import random
import statistics

from metalctl.app import Invocation
from metalctl.engine.config import EngineConfig
from metalctl.engine.sequence import SamplingParams
from metalctl.engine_start import running_engine
from metalctl.output import Output
from metalctl.settings import load_settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    invocation = Invocation(output=Output(), offline=False, debug=False, settings=load_settings())
    rng = random.Random(0)
    times: dict[str, list[float]] = {"first": [], "again": []}
    with running_engine(invocation, arguments.reference, EngineConfig()) as running:
        params = SamplingParams(temperature=0, max_tokens=1)
        vocab = running.thread.engine.vocab_size
        for _ in range(arguments.rounds):
            shared = [rng.randrange(100, vocab) for _ in range(arguments.tokens)]
            for name in times:
                prompt = [*shared, *(rng.randrange(100, vocab) for _ in range(8))]
                usage = list(running.thread.submit(prompt, params))[-1].usage
                assert usage is not None
                times[name].append(usage.time_to_first_token or 0.0)
                print(f"{name}: {times[name][-1] * 1e3:.1f} ms, {usage.cached_tokens} of {len(prompt)} tokens cached")
    first, again = (statistics.median(times[name]) for name in ("first", "again"))
    print(f"median {first * 1e3:.1f} ms, then {again * 1e3:.1f} ms: {first / again:.0f} times faster")


if __name__ == "__main__":
    main()
