"""Ray Data tasks that tokenize text to shards, and read shards in training order for ranks."""
