"""Array functions, each with a reference in plain MLX and fast bodies for the backends. Imports nothing but mlx."""
