"""`python -m hpcdist`."""

from hpcdist.cli import main

main()
