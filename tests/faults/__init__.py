"""Crash tests: what is left when a run is killed, interrupted, starved or not alone."""
