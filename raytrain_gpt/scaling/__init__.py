"""Scaling laws: forecasts of larger runs from small ones."""
