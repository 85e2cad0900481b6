"""Finding a checkpoint and turning its files into a model, a tokenizer and a chat template."""
