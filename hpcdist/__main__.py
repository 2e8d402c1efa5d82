"""`python -m hpcdist`."""

from hpcdist.cli.app import main

main()
