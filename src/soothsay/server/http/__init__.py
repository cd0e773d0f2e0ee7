"""What the server reads and writes as HTTP, whatever the API: bodies, JSON, streams, errors, connections."""
