"""Checkpoints: complete and hash-verified, or absent; written while training continues."""
