"""Runs the command line for `python -m soothsay`."""

from soothsay.cli.app import main

main()
