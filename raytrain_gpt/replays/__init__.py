"""Steps of a run again: the same bits, or what changes them."""
