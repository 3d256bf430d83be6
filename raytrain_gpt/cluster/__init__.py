"""Ray as a cluster: connecting, probing and leaving; nothing about training."""
