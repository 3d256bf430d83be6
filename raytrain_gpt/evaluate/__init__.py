"""How good a model is: validation loss, HellaSwag, samples; inside training, beside it and on its own."""
