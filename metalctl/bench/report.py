"""Results as a table, JSON, lines of JSON or CSV, and bars for a terminal."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from metalctl.output import human_bytes

Record = dict[str, Any]
BAR = 40  # characters of the longest


def render(form: str, machine: Record, records: Sequence[Record]) -> str:
    return FORMS[form](machine, records)


def bars(records: Sequence[Record], value: str, label: str) -> str:
    """One bar a record, as long as its share of the largest value; `label` is a format of the record's keys. Records
    without a value are left out."""
    shown = [(label.format(**record), float(record[value])) for record in records if record.get(value)]
    if not shown:
        return ""
    most = max(number for _, number in shown)
    width = max(len(name) for name, _ in shown)
    return "\n".join(f"{name:<{width}}  {_bar(number / most)} {number:.0f}" for name, number in shown)


def _bar(share: float) -> str:
    eighths = max(1, round(share * BAR * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def machine_lines(machine: Record) -> str:
    memory = human_bytes(machine["memory"])
    lines = [
        f"{machine['chip']}, {machine['cores']} cores, {memory}, {machine['os']}"
        + (f", power: {machine['power']}" if machine.get("power") else ""),
        f"metalctl {machine['metalctl']}, mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}, Python {machine['python']}",
    ]
    if machine.get("backend"):
        lines.append(
            f"backend {machine['backend']}; kernels: {machine['kernels']}"
            + (f"; {machine['blas'].split(' (')[0]}" if machine.get("blas") else "")
        )
    return "\n".join(lines)


def _markdown(machine: Record, records: Sequence[Record]) -> str:
    shown = [column for column in COLUMNS if any(record.get(column[1]) is not None for record in records)]
    titles = [title for title, _, _ in shown]
    rows = [[form(r[key]) if r.get(key) is not None else "" for _, key, form in shown] for r in records]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [
        _line(titles, widths),
        _line(["-" * width for width in widths], widths),
        *(_line(row, widths) for row in rows),
    ]
    return "\n".join([machine_lines(machine), "", *lines])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _json(machine: Record, records: Sequence[Record]) -> str:
    return json.dumps({"machine": machine, "results": list(records)}, indent=2)


def _lines(machine: Record, records: Sequence[Record]) -> str:
    return "\n".join(json.dumps({**record, "machine": machine}) for record in records)


def _csv(machine: Record, records: Sequence[Record]) -> str:
    text = io.StringIO()
    flat = [{**_flat(record), **machine} for record in records]
    writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(key for record in flat for key in record)))
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


def _flat(record: Record) -> Record:
    return {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in record.items()}


def _text(value: Any) -> str:
    return str(value)


def _speed(value: float) -> str:
    return f"{value:.1f}"


def _milliseconds(value: float) -> str:
    return f"{value * 1000:.0f}"


def _times(value: float) -> str:
    return f"{value:.2f}"


def _microseconds(value: float) -> str:
    return f"{value * 1e6:.0f}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _scientific(value: float) -> str:
    return f"{value:.1e}"


COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (  # title, key, form; shown where a record has a value
    ("kernel", "operation", _text),
    ("case", "name", _text),
    ("body", "body", _text),
    ("µs", "seconds", _microseconds),
    ("GB/s", "bytes_per_second", _gigabytes),
    ("of a copy", "share", _percent),
    ("error", "error", _scientific),
    ("plain error", "plain_error", _scientific),
    ("runtime", "runtime", _text),
    ("test", "test", _text),
    ("tok/s", "tokens_per_second", _speed),
    ("±", "deviation", _speed),
    ("clients", "concurrency", _text),
    ("requests", "requests", _text),
    ("failed", "failed", _text),
    ("out tok/s", "output_tokens_per_second", _speed),
    ("req/s", "requests_per_second", _times),
    ("TTFT p50 ms", "ttft_p50", _milliseconds),
    ("p95", "ttft_p95", _milliseconds),
    ("p99", "ttft_p99", _milliseconds),
    ("ITL p50 ms", "itl_p50", _milliseconds),
    ("p95", "itl_p95", _milliseconds),
    ("p99", "itl_p99", _milliseconds),
    ("peak memory", "peak_memory", human_bytes),
    ("metalctl is times", "ratio", _times),
    ("not measured", "missing", _text),
)
FORMS: dict[str, Callable[[Record, Sequence[Record]], str]] = {
    "md": _markdown,
    "json": _json,
    "jsonl": _lines,
    "csv": _csv,
}
