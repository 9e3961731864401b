"""A real server of vLLM."""
