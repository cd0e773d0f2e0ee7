"""Training: language models, and every drafter that learns from its target."""
