"""GGUF files: everything a model needs, from the file alone."""
