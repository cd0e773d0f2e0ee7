"""A model whose layers run in several processes, one range of layers in each."""
