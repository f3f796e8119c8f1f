"""megacp: training language models on contexts of millions of tokens."""
