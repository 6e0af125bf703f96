"""Simulations of the decision rules, beside the published tables: `python -m sims --help`."""
