"""Running a plan: every runtime in turn, round by round, so that what the machine does meanwhile meets all of them."""

from metalctl.bench.cells import Plan, Result
from metalctl.bench.own import OwnRuntime
from metalctl.bench.peers import NotSupported, Runtime, open_peer
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.output import Output


def run(plan: Plan, ours: OwnRuntime, checkpoint: Checkpoint, output: Output) -> list[Result]:
    """Results by cell, this program's before its peers'. Raises PeerError when a peer fails."""
    runtimes: list[OwnRuntime | Runtime] = [ours]
    try:
        for peer in plan.peers:
            output.note(f"starting {peer}")
            runtimes.append(open_peer(peer, checkpoint, plan.longest + 64))
        by_name = {runtime.name: runtime for runtime in runtimes}
        results = [Result(runtime.name, cell) for cell in plan.cells for runtime in runtimes]
        if plan.warmup:
            for result in results:
                output.detail(f"warm-up: {result.runtime} {result.cell.name}")
                _measure(by_name[result.runtime], result)
                result.values.clear()
        for round_ in range(plan.repeats):
            for result in results:
                output.detail(f"round {round_ + 1} of {plan.repeats}: {result.runtime} {result.cell.name}")
                _measure(by_name[result.runtime], result)
        return results
    finally:
        for runtime in runtimes:
            runtime.close()


def _measure(runtime: OwnRuntime | Runtime, result: Result) -> None:
    if result.missing:
        return
    try:
        result.values.append(result.cell.tokens / runtime.seconds(result.cell))
    except NotSupported as error:
        result.missing = str(error)
