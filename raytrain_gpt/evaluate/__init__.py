"""How good a model is: validation loss, HellaSwag, samples; in training, asynchronously and on its own."""
