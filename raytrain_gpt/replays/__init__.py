"""Replay recorded steps and compare the bits."""
