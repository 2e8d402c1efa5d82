"""Facts about this machine: hardware, drivers, file systems, the container image."""
