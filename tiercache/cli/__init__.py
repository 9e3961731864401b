"""Command-line interface: `tiercache VERB`."""

from tiercache.cli.app import main

__all__ = ["main"]
