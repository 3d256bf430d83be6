"""A run from its command to its last step, across restarts."""
