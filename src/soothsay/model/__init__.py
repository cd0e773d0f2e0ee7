"""soothsay."""
