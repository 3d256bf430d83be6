"""Reading runs: lists, reports, goodput, where data went."""
