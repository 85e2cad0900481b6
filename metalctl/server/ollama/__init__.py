"""The API of Ollama."""
