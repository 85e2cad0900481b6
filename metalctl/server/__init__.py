"""The HTTP server: what programs talk to."""
