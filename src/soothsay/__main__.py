"""Runs the command line: `soothsay`, and `python -m soothsay`."""


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130, also while its commands are imported."""
    try:
        from soothsay.cli.app import main

        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
