"""What the stores on a local disk share: the directory that they live in, and the check of the LMDB environment inside it."""
