"""Entry point of `python -m tiercache.cli`, for environments without the `tiercache` script on the path."""

from tiercache.cli import main

main()
