"""The program: what `metalctl` and `python -m metalctl` run."""

import contextlib
import os
import sys


def run() -> int:
    """The exit code of the command line that this process was given."""
    if sys.argv[1:] == ["completion", "--models"]:  # at every Tab, so without the parser, which takes long to import
        from metalctl.completion.names import print_names

        return print_names()
    try:
        from metalctl.cli import main
    except KeyboardInterrupt:
        return 130
    code = main()
    if "metalctl.engine.engine_thread" in sys.modules:
        # The engine's thread may still load (that cannot be stopped), or be giving back what MLX keeps for each thread,
        # for which it needs the interpreter. To end Python under it would crash.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(run())
