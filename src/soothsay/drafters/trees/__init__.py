"""What drafters share that have a distribution: guesses, trees, keys and values of their own."""
