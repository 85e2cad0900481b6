"""A conversation at the terminal: what is said, how it is shown, and the commands in between."""
