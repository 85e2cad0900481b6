"""The program: what `metalctl` and `python -m metalctl` run."""

import os
import sys
import threading


def run() -> int:
    """The exit code of the command line that this process was given."""
    try:
        from metalctl.cli import main
    except KeyboardInterrupt:
        return 130
    code = main()
    if any(thread.name == "engine" for thread in threading.enumerate()):
        # Interrupted while a model loads, which cannot be stopped; to end Python under it would crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(run())
