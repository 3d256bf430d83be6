"""Evaluation of models: validation loss, HellaSwag and samples, also asynchronous during training."""
