"""Between text, shards and ranks: Ray Data tasks that tokenize, and those that read the order."""
