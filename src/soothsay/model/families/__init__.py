"""How the `config.json` of a model family becomes a `ModelSpec`. `parsing` finds the function of each."""
