"""Other engines beside ours. `compare` measures, `client` talks to `engines`, `results` keeps."""
