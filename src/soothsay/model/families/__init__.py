"""How the `config.json` of a model family becomes a `ModelConfig`. `table` has one entry for each family."""
