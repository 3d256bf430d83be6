"""A run's rows, events, reports and trackers."""
