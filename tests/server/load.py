"""A load generator: many streams at once against any server with OpenAI's API, and what they saw.

For the tests, and to measure servers that `metalctl bench` cannot: it asks for chats, which every server answers. It
reads the bytes itself, since at many streams a client library would take the processor from the server that it
measures. Run as a program it prints a line of JSON for each concurrency, and fails when a request failed.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

_WORDS = """
    river stone window garden letter winter engine silver market forest bridge candle harbor island machine mountain
    number orange pencil quiet rocket school table umbrella valley water yellow zebra
"""


@dataclass(frozen=True)
class Load:
    """`requests` in all, `concurrency` of them at a time, each with a prompt of its own and `output_tokens` to come.

    `extra` are further fields of the request, such as a bias against the end of sequence.
    """

    requests: int
    concurrency: int
    prompt_words: int = 150
    output_tokens: int = 64
    model: str | None = None
    api_key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout: float = 600.0  # seconds, for one request


@dataclass
class Sample:
    """One request: when its tokens came, in seconds from when it was sent. Pieces that bring no text count as none."""

    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Spread:
    """Seconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(*(percentile(values, share) for share in (0.50, 0.95, 0.99)))


@dataclass(frozen=True)
class Outcome:
    """What a load saw. `output_per_second` is over all streams, from the first request to the last token."""

    concurrency: int
    requests: int
    failures: int
    elapsed: float
    output_tokens: int
    output_per_second: float
    time_to_first_token: Spread
    between_tokens: Spread


async def drive(url: str, load: Load) -> tuple[Outcome, list[Sample]]:
    """Put the load on the server at `url` ("http://host:port", without a path)."""
    samples = [Sample() for _ in range(load.requests)]
    waiting = iter(range(load.requests))
    began = time.perf_counter()

    async def worker() -> None:
        for index in waiting:
            await _ask(url, load, prompt(load, index), samples[index])

    await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    return summarise(load, samples, time.perf_counter() - began), samples


def prompt(load: Load, index: int) -> str:
    """Words that no other request begins with, so that no cache of prefixes helps."""
    dice = random.Random(f"{load.seed} {index}")
    return " ".join(dice.choices(_WORDS.split(), k=load.prompt_words))


def summarise(load: Load, samples: Sequence[Sample], elapsed: float) -> Outcome:
    good = [sample for sample in samples if sample.error is None]
    gaps = [b - a for sample in good for a, b in zip(sample.arrivals, sample.arrivals[1:], strict=False)]
    tokens = sum(sample.tokens for sample in good)
    return Outcome(
        concurrency=load.concurrency,
        requests=len(samples),
        failures=len(samples) - len(good),
        elapsed=elapsed,
        output_tokens=tokens,
        output_per_second=tokens / elapsed,
        time_to_first_token=Spread.of([sample.arrivals[0] for sample in good if sample.arrivals]),
        between_tokens=Spread.of(gaps),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation; not a number when there are none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


async def _ask(url: str, load: Load, text: str, sample: Sample) -> None:
    asked = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": load.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"model": load.model} if load.model else {}),
        **load.extra,
    }
    began = time.perf_counter()
    try:
        async with asyncio.timeout(load.timeout):
            async for event in post(url, "/v1/chat/completions", asked, load.api_key):
                _note(event, sample, time.perf_counter() - began)
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.tokens = sample.tokens or len(sample.arrivals)


def _note(event: dict[str, Any], sample: Sample, now: float) -> None:
    if "error" in event:
        raise ValueError(str(event["error"]))
    usage = event.get("usage")
    if usage:
        sample.tokens = usage["completion_tokens"]
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        piece = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
        if piece:
            sample.arrivals.append(now)
            sample.text += piece


async def post(
    url: str, path: str, asked: Mapping[str, Any], api_key: str | None = None
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer. Raises OSError, and ValueError for a status other than 200."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port or 80)
    try:
        data = json.dumps(asked).encode()
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n{key}"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            raise ValueError((await reader.read(4096)).decode("utf-8", "replace")[-500:])
        while (line := await reader.readline()) not in (b"data: [DONE]\n", b"data: [DONE]\r\n", b""):
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    finally:
        writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, help="for each concurrency; four times as many as streams by default")
    parser.add_argument("--prompt-words", type=int, default=150)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--model")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--extra", type=json.loads, default={}, help="further fields of the request, as JSON")
    arguments = parser.parse_args()
    failures = 0
    for number in map(int, arguments.concurrency.split(",")):
        load = Load(
            requests=arguments.requests or 4 * number,
            concurrency=number,
            prompt_words=arguments.prompt_words,
            output_tokens=arguments.output_tokens,
            model=arguments.model,
            extra=arguments.extra,
            seed=1000 * arguments.seed + number,
        )
        outcome, samples = asyncio.run(drive(arguments.url, load))
        errors = sorted({sample.error for sample in samples if sample.error})[:3]
        sys.stdout.write(json.dumps({**asdict(outcome), "errors": errors}) + "\n")
        sys.stdout.flush()
        failures += outcome.failures
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
