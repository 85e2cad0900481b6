"""What a person or a client touches: the command line and the HTTP server."""

from metalctl.version import __version__

__all__ = ["__version__"]
