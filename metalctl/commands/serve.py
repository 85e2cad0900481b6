"""`metalctl serve`: models over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from metalctl.app import Invocation, command
from metalctl.commands.options import Context, GGUFPrecision, TrustRemoteCode
from metalctl.engine.config import EngineConfig, KVDtype, PrefixCacheMode
from metalctl.engine.errors import UsageError
from metalctl.engine_start import before_mlx

_DEFAULTS = EngineConfig()


@command("serve", short_help="Serve models over the APIs of OpenAI, Anthropic and Ollama.")
def serve(
    invocation: Invocation,
    references: Annotated[
        list[str] | None, typer.Argument(metavar="REF", help="The models; the first is the default.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_name: Annotated[
        list[str] | None, typer.Option("--served-name", help="What a model is called in the API, in the order of REF.")
    ] = None,
    cached: Annotated[bool, typer.Option("--cached", help="Offer every model in the caches, too.")] = False,
    api_key: Annotated[list[str] | None, typer.Option(help="Demand this key; may be repeated.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys, one a line.")] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Serve other machines without a key.")] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further name in the Host header to answer to; * is any.")
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="A web page that may call; * is any.")] = None,
    context: Context = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences at the same time.")] = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a step computes.")
    ] = _DEFAULTS.max_num_batched_tokens,
    max_queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait, for each model.")] = 256,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the device's memory for weights and caches.")
    ] = _DEFAULTS.gpu_memory_utilization,
    kv_cache_dtype: Annotated[KVDtype, typer.Option(help="What keys and values are kept in.")] = "auto",
    prefix_cache: Annotated[PrefixCacheMode, typer.Option(help="Reuse of common beginnings.")] = "on",
    max_loaded: Annotated[
        int | None, typer.Option(min=1, help="Models loaded at a time; by default all, at most 3.")
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For the weights of all loaded models, as 24GB.")
    ] = None,
    keep_alive: Annotated[
        str, typer.Option(metavar="TIME", help="Unload a model after so long without a request, as 5m; -1 never.")
    ] = "-1",
    pin: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A model that is never unloaded.")] = None,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="The largest request.")] = "32MB",
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds that running requests get to finish.")] = 60.0,
    precision: GGUFPrecision = _DEFAULTS.precision,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve models to programs that speak the API of OpenAI, Anthropic or Ollama.

    The first REF is loaded at once, the others when they are asked for. SIGTERM or Ctrl-C lets running requests finish;
    a second Ctrl-C does not.
    """
    from metalctl.kernels import blas

    blas.preload()  # before the server imports mlx, or it has no effect
    before_mlx(invocation.output)
    from metalctl.server.durations import parse_seconds
    from metalctl.server.launch import Launch, keys, parse_size, run

    given = list(references or ([invocation.settings.model] if invocation.settings.model else []))
    names = served_name or []
    if len(names) > len(given):
        raise UsageError("there are more --served-name than models.", "Give one for each REF, in their order.")
    launch = Launch(
        references=given,
        names=[*names, *given[len(names) :]],
        cached=cached or not given,
        host=host,
        port=port,
        api_keys=keys(api_key or [], api_key_file),
        no_auth=no_auth,
        allowed_hosts=allowed_host or [],
        origins=cors_origin or [],
        engine=EngineConfig(
            max_model_len=context,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            prefix_cache=prefix_cache,
            precision=precision,
        ),
        max_queue=max_queue,
        max_loaded=max_loaded or max(1, min(3, len(given))),
        memory=parse_size(memory_budget) if memory_budget else None,
        keep_alive=parse_seconds(keep_alive),
        pinned=pin or [],
        max_body=parse_size(max_body),
        drain_timeout=drain_timeout,
        trust_remote_code=trust_remote_code,
    )
    run(invocation, launch)
