"""Files on shared file systems: retries, locks, ownership, format numbers, bounded parsing."""
