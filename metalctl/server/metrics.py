"""What Prometheus reads: requests, tokens, times, and how full the engines are."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from metalctl.engine.sequence import FinishReason, RequestOutput
from metalctl.version import __version__

if TYPE_CHECKING:
    from metalctl.server.models import ServedModel

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """`models` gives the models that are loaded, when the page is read."""

    def __init__(self, models: Callable[[], "Iterable[ServedModel]"]):
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(models))
        Gauge("metalctl_info", "Version.", ["version"], registry=self.registry).labels(__version__).set(1)
        self._requests = self._counter("http_requests", "Requests by route and status.", "route", "status")
        self._durations = self._histogram("http_request_duration_seconds", "Until the last byte was sent.", "route")
        self._finished = self._counter("generations", "Finished generations.", "model", "reason")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.", "model")
        self._cached = self._counter("prompt_tokens_cached", "Those that the prefix cache had.", "model")
        self._output = self._counter("generated_tokens", "Tokens generated.", "model")
        self._preemptions = self._counter("preemptions", "Sequences computed anew for want of blocks.", "model")
        self._queue = self._histogram("queue_time_seconds", "From arrival to the first step.", "model")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival.", "model")
        self._between = self._histogram("inter_token_seconds", "Mean over a generation.", "model")
        self.loads = self._counter("model_loads", "Models loaded.", "model")
        self.unloads = self._counter("model_unloads", "Models unloaded.", "model")

    def request(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._requests.labels(route, str(status)).inc()
        self._durations.labels(route).observe(seconds)

    def finished(self, model: str, output: RequestOutput) -> None:
        """Count a generation by its last output."""
        self._finished.labels(model, output.finish_reason or FinishReason.ABORT).inc()
        usage = output.usage
        if usage is None:
            return
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._cached.labels(model).inc(usage.cached_tokens)
        self._output.labels(model).inc(usage.output_tokens)
        self._preemptions.labels(model).inc(usage.preemptions)
        if usage.queue_time is not None:
            self._queue.labels(model).observe(usage.queue_time)
        if usage.time_to_first_token is not None:
            self._first.labels(model).observe(usage.time_to_first_token)
            if usage.output_tokens > 1:
                seconds = usage.elapsed - usage.time_to_first_token
                self._between.labels(model).observe(seconds / (usage.output_tokens - 1))

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"metalctl_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"metalctl_{name}", text, labels, registry=self.registry, buckets=_SECONDS)


class _Engines(Collector):
    """Gauges that are read from the engines when somebody asks."""

    _GAUGES = (
        ("running", "Sequences in the batch."),
        ("waiting", "Sequences in the queue."),
        ("cache_bytes", "Bytes that the cache has allocated."),
        ("cache_blocks_used", "Blocks held by sequences."),
        ("cache_blocks_limit", "Blocks that there can be."),
    )

    def __init__(self, models: Callable[[], "Iterable[ServedModel]"]):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        stats = [(model.name, model.thread.engine.stats()) for model in self._models()]
        for name, text in self._GAUGES:
            family = GaugeMetricFamily(f"metalctl_{name}", text, labels=["model"])
            for model, values in stats:
                family.add_metric([model], getattr(values, name))
            yield family
