"""What is wrong: with a run that has ended, or does not."""
