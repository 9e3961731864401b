"""Entry point of `python -m tiercache.cli`, for environments where the `tiercache` script is not on the path."""

from tiercache.cli import main

main()
