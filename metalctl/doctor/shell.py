"""What stands around the program: the server's port, and the shell's completions."""

import errno
import os
import socket
from pathlib import Path

import psutil

from metalctl.doctor.check import Check, failure, ok, warning
from metalctl.models import short_path

FILES = {
    "bash": (
        "~/.local/share/bash-completion/completions/metalctl",
        "/usr/share/bash-completion/completions/metalctl",
        "/usr/local/share/bash-completion/completions/metalctl",
        "$HOMEBREW_PREFIX/etc/bash_completion.d/metalctl",
    ),
    "zsh": (
        "~/.zfunc/_metalctl",
        "/usr/share/zsh/site-functions/_metalctl",
        "/usr/local/share/zsh/site-functions/_metalctl",
        "$HOMEBREW_PREFIX/share/zsh/site-functions/_metalctl",
    ),
    "fish": (
        "~/.config/fish/completions/metalctl.fish",
        "/usr/share/fish/vendor_completions.d/metalctl.fish",
        "$HOMEBREW_PREFIX/share/fish/vendor_completions.d/metalctl.fish",
    ),
}
STARTUP = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


def port(number: int, host: str = "127.0.0.1") -> Check:
    """Whether `serve` would find its port free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                fix = "If that is metalctl, it serves already; else serve with --port and another number."
                return warning("port", f"{number} is in use{_by_whom(number)}", fix)
            return failure(
                "port", f"{number} cannot be listened at: {error.strerror}", "Use a port above 1023 (--port)."
            )
    return ok("port", f"{number} is free for metalctl serve")


def _by_whom(number: int) -> str:
    """Told only for programs of the same user, on a Mac."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    pids = [c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == number and c.pid]
    return f" by {psutil.Process(pids[0]).name()} (process {pids[0]})" if pids else ""


def completions(shell: str | None = None) -> Check:
    """Whether the user's shell knows what metalctl takes."""
    name = Path(shell if shell is not None else os.environ.get("SHELL", "")).name
    if name not in FILES:
        return ok("completions", f"there are none for {name}" if name else "no shell is set")
    for text in FILES[name]:
        path = Path(os.path.expandvars(text)).expanduser()
        if path.is_file():
            return ok("completions", f"{name}, by {short_path(path)}")
    startup = Path(STARTUP[name]).expanduser()
    if startup.is_file() and "metalctl completion" in startup.read_text(encoding="utf-8", errors="replace"):
        return ok("completions", f"{name}, by {short_path(startup)}")
    folder = Path(FILES[name][0]).parent
    fix = f"mkdir -p {folder}; metalctl completion {name} > {FILES[name][0]}"
    note = "; ~/.zfunc must be in fpath" if name == "zsh" else ""
    return warning("completions", f"{name} has none for metalctl", fix + note)
