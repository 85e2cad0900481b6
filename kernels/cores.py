"""How many cores this process may use: what the scheduler's affinity and the container's quota leave of the machine."""

import os
from functools import cache
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@cache
def usable_cores() -> int:
    """At least 1. A quota that is not a whole number of cores counts as the next lower one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(_CGROUPS, _own_group())
    return max(1, min(allowed, int(quota)) if quota is not None else allowed)


def cgroup_quota(root: Path, group: str) -> float | None:
    """Cores that the cgroup `group` below `root` and the groups above it leave, None without a limit."""
    limits = [_v1_quota(root / "cpu"), _v2_quota(root)]
    path = root
    for part in Path(group).parts:
        if part != "/":
            path = path / part
            limits.append(_v2_quota(path))
    return min((limit for limit in limits if limit is not None), default=None)


def _own_group() -> str:
    """This process's cgroup in the unified hierarchy."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return "/"
    return next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/")


def _v2_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _v1_quota(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
