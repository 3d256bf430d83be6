"""What a run writes for people and trackers: rows, events, reports."""
