"""The mathematics of training: torch only, no Ray, no files but checkpoints' tensors."""
