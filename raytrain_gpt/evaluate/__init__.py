"""Evaluation of models: validation loss, HellaSwag and samples."""
