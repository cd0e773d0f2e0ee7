"""`soothsay bench serve`: load on servers that speak OpenAI's protocol.

`server_load` says what is sent and when, `serve_bench` lets the servers take turns, `serve_results` stores
and sums up the answers, `load_page` shows them.
"""
