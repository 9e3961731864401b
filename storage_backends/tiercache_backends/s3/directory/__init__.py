"""A process's knowledge of the bucket: what lies there, and how that is learned."""
