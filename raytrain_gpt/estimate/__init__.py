"""Estimates of a run's memory, time and price."""
