"""Parts that the stores on a local disk share: directory, checks of LMDB's file, settings, threads."""
