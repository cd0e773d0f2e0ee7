"""An HTTP server that speaks OpenAI's protocol.

Start at `http_server.Server`; `runner.make_runner` serves it, and `fleet.engine_fleet.Fleet` has the engines.
"""
