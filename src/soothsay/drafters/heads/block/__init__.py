"""One-pass heads that soothsay trains."""
