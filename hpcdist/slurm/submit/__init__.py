"""Submission of runs: checks of the request, the batch script, and sbatch."""
