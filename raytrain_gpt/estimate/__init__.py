"""What a run will take, before anybody pays for it."""
