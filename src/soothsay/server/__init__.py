"""An HTTP server that speaks OpenAI's protocol. Start at `app.Server`; `runner.make_runner` serves it, and
`fleet.fleet.Fleet` has the engines that answer."""
