"""`soothsay bench ...`: what the commands ask and show. `bench_app.py` lists them."""
