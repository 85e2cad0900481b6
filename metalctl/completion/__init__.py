"""Completion for bash, zsh and fish: scripts written from the commands themselves, and the models' names."""
