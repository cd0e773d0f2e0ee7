"""`soothsay bench ...`: one file a command. `bench_app.py` lists them."""
