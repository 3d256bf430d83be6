"""`serve`: a checkpoint behind an OpenAI-compatible HTTP API on Ray Serve, with a web page."""
