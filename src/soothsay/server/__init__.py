"""An HTTP server that speaks OpenAI's protocol. Start at `app.Server`; `run.make_runner` serves it, and
`process.EngineProcess` is who answers."""
