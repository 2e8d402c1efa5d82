"""Files on shared file systems: atomic writes, retries, locks, ownership, format numbers, bounded parsing."""
