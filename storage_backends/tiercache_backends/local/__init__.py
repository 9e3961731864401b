"""Parts that the stores on a local disk share: their directory, the check of the LMDB environment inside it, settings, and threads."""
