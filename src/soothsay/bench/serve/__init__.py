"""`soothsay bench serve`: load on servers that speak OpenAI's protocol.

`mix` says what is sent, `arrivals` when; `serve_bench` lets the servers take turns, `serve_results` stores
and sums up the answers; `load_tables`, `load_charts` and `load_page` show them.
"""
