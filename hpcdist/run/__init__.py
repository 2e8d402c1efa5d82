"""Run folders: layout, lease, status, lookup, code snapshot, sweeps."""
