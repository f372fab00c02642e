"""`python -m archsearch` is the command line."""

from archsearch.cli import main

main()
