"""Its place puts the root on the import path: the tests import `sims`, which is not installed."""
