"""The configuration of a run: its fields, where they come from, and what follows from them."""
