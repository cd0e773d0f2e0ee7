"""`soothsay train ...`: commands that train drafters and models. `train_app.py` lists them."""
