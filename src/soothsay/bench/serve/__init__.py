"""`soothsay bench serve`: load on servers that speak OpenAI's protocol.

`mix` says what is asked, `load` when, `results` keeps what came and adds it up, `compare` has the servers
take turns, `tables`, `plots` and `page` show it.
"""
