"""`python -m soothsay` is the command."""

from soothsay.cli import main

main()
