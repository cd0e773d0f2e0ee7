"""An HTTP server that speaks OpenAI's protocol. Start at `app.create_app`; `run.run` serves it."""
