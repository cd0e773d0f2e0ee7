"""The command line. `app.py` lists the commands; one file each, with the command's name."""
