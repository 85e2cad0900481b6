"""One module a command: parse, call the engine, render. Nothing heavy is imported at the top of these modules."""
