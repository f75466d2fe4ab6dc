"""What several tests need: tiny real runs, trainers, models."""
