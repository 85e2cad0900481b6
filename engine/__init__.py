"""From a model reference to tokens. Never prints, never exits, knows no HTTP and no command line."""
