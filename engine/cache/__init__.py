"""The paged KV cache and the recurrent states: who owns which block, and the arrays behind them."""
