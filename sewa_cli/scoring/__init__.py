"""Choosing by a metric: what is scored, in which processes, and what held-out scores say."""
