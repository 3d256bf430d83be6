"""Text to token shards, and the order in which they are trained on: NumPy, PyArrow, tiktoken."""
