"""Tiny real runs, trainers and models for several test modules."""
