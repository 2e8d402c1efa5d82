"""Python environments of ranks without containers: packed once, copied to each node's local disk, checked there."""
