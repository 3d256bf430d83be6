"""Scaling laws: what a larger run will reach, from small runs."""
