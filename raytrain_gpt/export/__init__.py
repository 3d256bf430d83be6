"""Results for other tools: Hugging Face directories, model cards, generated text."""
