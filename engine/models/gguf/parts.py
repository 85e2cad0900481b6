"""Models that are split over several GGUF files, as `llama-gguf-split` writes them."""

import re
from dataclasses import replace
from pathlib import Path

from metalctl.engine.errors import CheckpointError, ModelNotFoundError
from metalctl.engine.models.gguf.reader import Header, TensorInfo, read_file_header

PART = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)


def part_names(name: str) -> list[str]:
    """The file names of all the parts, first to last, given any one of them; of an unsplit file its own name."""
    match = PART.match(name)
    if not match or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    ending = name[match.end("count") :]
    return [f"{match['stem']}-{number:05d}-of-{match['count']}{ending}" for number in range(1, int(match["count"]) + 1)]


def split_parts(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of. Raises ModelNotFoundError naming the missing ones."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing and len(parts) > 1:
        raise ModelNotFoundError(
            f"{path.name} is one of {len(parts)} files, and of these {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing in {path.parent}.",
            "Put all parts into one folder.",
        )
    if missing:
        raise ModelNotFoundError(f"There is no file {path}.", "Check the path.")
    return parts


def read_headers(paths: list[Path]) -> list[Header]:
    """The headers of all parts, checked to be parts of one model in the right order. Raises CheckpointError."""
    headers = [read_file_header(path) for path in paths]
    first = headers[0]
    count = first.get("split.count", int, 0)
    if (count or 1) != len(headers):
        raise CheckpointError(
            f"{first.name} says that its model has {count or 1} parts; by its name it has {len(headers)}.",
            "Keep the names that the files were published with.",
        )
    if len(headers) > 1:
        _check_parts(headers)
    return headers


def merge_headers(headers: list[Header]) -> Header:
    """One header for the whole model: the first part's metadata, the tensors of all. Offsets count inside each part."""
    first = headers[0]
    if len(headers) == 1:
        return first
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for info in header.tensors:
            if info.name in tensors:
                raise CheckpointError(f"{header.name}: tensor {info.name!r} is in an earlier part too.")
            tensors[info.name] = info
    return replace(first, tensors=tuple(tensors.values()), file_size=sum(header.file_size for header in headers))


def _check_parts(headers: list[Header]) -> None:
    for number, header in enumerate(headers):
        count, index = header.get("split.count", int, 0), header.get("split.no", int, -1)
        if (count, index) != (len(headers), number):
            raise CheckpointError(
                f"{header.name} does not belong here: it says that it is part {(index or 0) + 1} of {count}, "
                f"not part {number + 1} of {len(headers)}.",
                "Download this part again.",
            )
    expected = {header.get("split.tensors.count", int) for header in headers}
    found = sum(len(header.tensors) for header in headers)
    if expected != {found}:
        raise CheckpointError(
            f"The parts of {headers[0].name} are not of one model: they have {found} tensors in all, and announce "
            f"{' or '.join(sorted(map(str, expected)))}.",
            "Download all parts again, at one revision.",
        )
