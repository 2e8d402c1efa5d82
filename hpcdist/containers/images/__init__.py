"""Build, inspect, check and convert images of hpcdist."""
