"""pytest-dsv41: A/B windows for self-hosted LLM servers as pytest sessions."""

__version__ = "0.1.0"
