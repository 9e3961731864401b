"""The backend for a remote daemon, over every way to it."""
