"""`metalctl bench`: how fast a model runs here, alone or beside other programs."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from metalctl.app import Invocation, command
from metalctl.commands.options import Context, GGUFPrecision, TrustRemoteCode
from metalctl.engine.config import EngineConfig
from metalctl.engine.errors import UsageError
from metalctl.output import Output

if TYPE_CHECKING:
    from metalctl.bench.cells import Plan
    from metalctl.bench.serving import Load

Form = Literal["md", "json", "jsonl", "csv"]
PEERS = ("mlx-lm", "llama.cpp")


@command("bench", short_help="Measure how fast a model reads and writes.")
def bench(
    invocation: Invocation,
    reference: Annotated[str | None, typer.Argument(metavar="REF", help="The model.")] = None,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Tokens to read; a list as 128,512; 0 for none.")
    ] = "512",
    generate: Annotated[str, typer.Option("--generate", "-n", help="Tokens to write; a list; 0 for none.")] = "128",
    depth: Annotated[str, typer.Option("--depth", "-d", help="Tokens in the cache before; a list.")] = "0",
    batch: Annotated[str, typer.Option("--batch", "-b", help="Sequences at once; a list.")] = "1",
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1, help="Rounds of each measurement.")] = 5,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="One round first that does not count.")] = True,
    compare: Annotated[
        list[str] | None, typer.Option(help="Run mlx-lm or llama.cpp, too, in turn; may be repeated.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Measure a server instead, under so many clients at once; a list as 1,8,32.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Of a level; by default 4 a client.")] = None,
    shared_prefix: Annotated[int, typer.Option(min=0, help="First tokens of every prompt that are the same.")] = 0,
    url: Annotated[str | None, typer.Option(help="Measure the server that runs there; REF is not needed.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Its key.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Measure single kernels; no REF.")] = False,
    form: Annotated[Form, typer.Option("--output", "-o", help="How to print.")] = "md",
    seed: Annotated[int, typer.Option(help="Of the random prompts, which are new in every round.")] = 0,
    context: Context = None,
    precision: GGUFPrecision = "size",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure how fast a model reads and writes, alone or beside mlx-lm and llama.cpp on the same weights.

    Prompts are random tokens, new in every round, so that no cache helps. With --concurrency a server is measured:
    one that is started for it, or the one at --url.
    """
    from metalctl.bench import serving
    from metalctl.bench.cells import Plan, matrix, numbers

    output = Printer(invocation.output, form)
    if kernels:
        return _kernels(invocation, output)
    model = reference or invocation.settings.model
    if model is None and url is None:
        raise UsageError("there is no model to measure.", "Name one: `metalctl bench smollm2`.")
    peers = _peers(compare or [])
    if concurrency is None and url is None:
        cells = matrix(
            numbers(prompt, "--prompt"),
            numbers(generate, "--generate"),
            numbers(depth, "--depth"),
            numbers(batch, "--batch", 1),
        )
        plan = Plan(cells, repeats, warmup, peers, seed)
        config = EngineConfig(max_model_len=context, max_num_seqs=plan.most_sequences, precision=precision)
        assert model is not None
        return _matrix(invocation, output, model, plan, config, trust_remote_code)
    levels = numbers(concurrency or "1", "--concurrency", least=1)
    loads = serving.plan(levels, requests, _one(prompt, "--prompt"), _one(generate, "--generate"), shared_prefix)
    if url is not None:
        return _running_server(output, url, api_key, loads, peers, seed)
    assert model is not None
    return _own_server(invocation, output, model, loads, peers, seed, trust_remote_code)


@dataclass(frozen=True)
class Printer:
    output: Output
    form: Form

    def __call__(self, machine: dict[str, Any], records: list[dict[str, Any]], value: str, label: str) -> None:
        """Results in the form that was asked for; on a terminal with a bar for each `value`, named by `label`."""
        from metalctl.bench.report import bars, render

        self.output.result({"machine": machine, "results": records})
        self.output.text(render(self.form, machine, records))
        if self.form == "md" and self.output.stdout.is_terminal:
            self.output.text("\n" + bars(records, value, label))


def _matrix(
    invocation: Invocation, output: Printer, reference: str, plan: "Plan", config: EngineConfig, trust_remote_code: bool
) -> None:
    from metalctl.bench.cells import ratios
    from metalctl.bench.machine import describe, describe_backend
    from metalctl.bench.matrix import run
    from metalctl.bench.own import NAME, OwnRuntime
    from metalctl.engine_start import running_engine

    with running_engine(invocation, reference, config, trust_remote_code=trust_remote_code) as engine:
        plan.check(engine.thread.engine.max_model_len)
        results = run(plan, OwnRuntime(engine.thread, plan.seed), engine.checkpoint, output.output)
        backend = engine.thread.call(lambda _: describe_backend())
        model = {"model": engine.checkpoint.reference, "model_size": engine.checkpoint.size}
    records = [result.record(ratio) for result, ratio in zip(results, ratios(results, NAME), strict=True)]
    output({**describe(), **backend, **model}, records, "tokens_per_second", "{test} {runtime}")


def _own_server(
    invocation: Invocation,
    output: Printer,
    reference: str,
    loads: "list[Load]",
    peers: list[str],
    seed: int,
    trust_remote_code: bool,
) -> None:
    from metalctl.bench import serving
    from metalctl.bench.machine import describe
    from metalctl.engine_start import find_model

    if "mlx-lm" in peers:
        raise UsageError("a server can be compared with llama.cpp's only.", "Leave out --concurrency for mlx-lm.")
    checkpoint = find_model(invocation, reference)
    records = []
    with serving.own_server(checkpoint, loads, trust_remote_code) as target:
        records += serving.sweep("metalctl", target, loads, seed, output.output.detail)
    if peers:
        with serving.llama_server(checkpoint, loads) as target:
            records += serving.sweep("llama.cpp", target, loads, seed, output.output.detail)
    serving.add_ratios(records)
    machine = {**describe(), "model": checkpoint.reference, "model_size": checkpoint.size}
    output(machine, records, "output_tokens_per_second", "{concurrency} clients {runtime}")


def _running_server(
    output: Printer, url: str, key: str | None, loads: "list[Load]", peers: list[str], seed: int
) -> None:
    from metalctl.bench import serving
    from metalctl.bench.machine import describe

    if peers:
        raise UsageError("--compare starts its servers itself; --url measures one that runs.", "Give one of the two.")
    target = serving.find(url, key)
    records = serving.sweep(target.model, target, loads, seed, output.output.detail)
    output({**describe(), "url": target.url}, records, "output_tokens_per_second", "{concurrency} clients")


def _kernels(invocation: Invocation, output: Printer) -> None:
    from metalctl.bench.machine import describe, describe_backend
    from metalctl.engine import acceleration
    from metalctl.engine_start import kernel_cache
    from metalctl.kernels.measure import measure

    acceleration.prepare(kernel_cache(), invocation.output.note)
    records: list[dict[str, Any]] = []
    for measurement in measure():
        invocation.output.detail(measurement.name)
        records.append(asdict(measurement) | {"sound": measurement.sound})
    output({**describe(), **describe_backend()}, records, "bytes_per_second", "{operation} {name}")


def _peers(names: list[str]) -> list[str]:
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--compare {name}: there is no such peer.", f"Those are {' and '.join(PEERS)}.")
    return list(dict.fromkeys(names))


def _one(text: str, option: str) -> int:
    from metalctl.bench.cells import numbers

    found = numbers(text, option, least=1)
    if len(found) > 1:
        raise UsageError(f"{option} takes one number when a server is measured.")
    return found[0]
