"""Text to token shards, and their training order: NumPy, PyArrow, tiktoken."""
