"""The ground types of a step: request, tree, batch, cache, sampling, verification."""
