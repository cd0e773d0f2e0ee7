"""The command line. `app.py` lists the commands. Each is a dataclass of options, with what it does."""
