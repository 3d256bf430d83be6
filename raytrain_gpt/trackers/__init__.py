"""Writing a run: its small files, and trackers."""
