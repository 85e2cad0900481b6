"""Kernels for MLX's CPU backend in C++, compiled on first use by the system's compiler."""
