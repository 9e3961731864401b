"""`python -m tiercache.cli`: the command where its script is not on the path."""

from tiercache.cli import main

main()
