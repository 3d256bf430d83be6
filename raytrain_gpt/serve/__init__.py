"""`serve`: a checkpoint behind an HTTP interface like OpenAI's, on Ray Serve, with a page to try it."""
