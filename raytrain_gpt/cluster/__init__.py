"""Ray as a cluster: connected to, probed, left; nothing of training."""
