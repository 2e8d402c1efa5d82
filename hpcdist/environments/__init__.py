"""Python environments of ranks without containers: a virtual environment by its path, or environment modules."""
