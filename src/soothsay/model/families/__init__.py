"""How the `config.json` of a model family becomes a `ModelSpec`. `parsing` has the function of each family."""
