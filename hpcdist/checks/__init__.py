"""What `hpcdist doctor` checks."""
