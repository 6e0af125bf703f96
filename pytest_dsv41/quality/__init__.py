"""Is it still the same model? Greedy comparison, KL, the distributional gate, the A/A pilot."""
