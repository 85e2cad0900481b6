"""Measures this machine and writes the figures into docs/performance.md: python tests/benchmarks/performance.py

What is on the PATH of llama.cpp (llama-bench, llama-server) is compared, too. Run it while nothing else runs.
"""

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def bench(*arguments: str) -> str:
    command = [sys.executable, "-m", "metalctl", "bench", *arguments, "-o", "md", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def accuracy(reference: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent / "cpu_accuracy.py"), reference, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def table(text: str) -> tuple[str, str]:
    """The lines about the machine, and the table."""
    machine, _, rows = text.partition("\n\n")
    return machine, rows


def besides(reference: str, repeats: int, peers: list[str]) -> list[str]:
    """A section on another model, beside the peers that are fast enough to wait for."""
    others = [word for peer in peers if peer != "mlx-lm" for word in ("--compare", peer)]
    _, rows = table(bench(reference, "-p", "128", "-n", "32", "-r", str(repeats), *others))
    return ["", f"`{Path(reference).name}`, in the same way:", "", rows]


def memory(reference: str) -> str:
    """A line on what is resident, with a cache of 600 MB that eight long prompts fill."""
    script = str(Path(__file__).parent / "memory.py")
    command = [sys.executable, script, reference, "--cache-bytes", "600000000"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    return (
        f"`{Path(reference).name}`, a file of {found['file']:.0f} MB: {found['loaded']:.0f} MB resident once loaded, "
        f"{found['peak']:.0f} MB at most with a cache of {found['cache_budget']:.0f} MB that is full: "
        f"{found['peak'] / (found['file'] + found['cache_budget']):.2f} times the file and the cache together, and "
        f"{found['share']:.2f} of 1.3 times the file plus the cache."
    )


def report(reference: str, repeats: int, peers: list[str], also: list[str]) -> str:
    compare = [word for peer in peers for word in ("--compare", peer)]
    machine, matrix = table(bench(reference, "-p", "128", "-n", "32", "-r", str(repeats), *compare))
    _, deeper = table(bench(reference, "-p", "512", "-n", "128", "-d", "0,1024", "-r", str(repeats)))
    _, batches = table(bench(reference, "-p", "0", "-n", "64", "-b", "2,4,8,16", "-r", str(repeats)))
    others = [word for peer in peers if peer != "mlx-lm" for word in ("--compare", peer)]
    _, served = table(bench(reference, "--concurrency", "1,8", "-p", "128", "-n", "64", *others))
    exact = accuracy(reference)
    gaps = [f"{gap:.2f}" for some in exact["departures"].values() for _, gap in some]
    return "\n".join(
        [
            f"Measured {datetime.now(UTC):%Y-%m-%d} with `{reference}`.",
            "",
            "```text",
            machine,
            "```",
            "",
            "Beside other programs, on the same weights, in turn:",
            "",
            matrix,
            *(line for other in also for line in besides(other, repeats, peers)),
            "",
            "Longer, and behind tokens that are in the cache already:",
            "",
            deeper,
            "",
            "Several sequences at once (tokens of all together):",
            "",
            batches,
            "",
            "A server under load, prompts of 128 random tokens and answers of 64:",
            "",
            served,
            "",
            "Memory: " + " ".join(memory(model) for model in (reference, *also)),
            "",
            f"Perplexity over {exact['tokens']} tokens is {exact['perplexity']:.3f}, against "
            f"{exact['perplexity_float32']:.3f} with the same weights in float32 ({exact['difference']:+.2%}). Of "
            f"{exact['greedy_tokens']} greedy tokens {len(gaps) or 'none'} are not what float32 would have chosen there"
            + (f"; they are less likely by {', '.join(gaps)} nats." if gaps else "."),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", nargs="?", default="smollm2")
    parser.add_argument("--repeats", "-r", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], choices=["mlx-lm", "llama.cpp"])
    parser.add_argument("--also", action="append", default=[], metavar="REF", help="a further model, more briefly")
    arguments = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    measured = report(arguments.reference, arguments.repeats, arguments.peer, arguments.also)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
