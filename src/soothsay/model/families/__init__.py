"""How the `config.json` of a model family becomes a `ModelSpec`. `table` has one function for each family."""
