"""The command line. Each command imports its modules when it runs."""
