"""Explanation of failed and hanging runs, and checks of machines."""
