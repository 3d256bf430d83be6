"""Pretrain GPT-2-class language models on Ray, from raw text to a trained model."""

__version__ = "0.1.0"
