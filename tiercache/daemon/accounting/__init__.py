"""The account of a daemon, by tenant and hour, and the stores whose calls count in it."""
