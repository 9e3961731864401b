"""Three machines in one: hosts as network namespaces, with real workers and stores on them."""
