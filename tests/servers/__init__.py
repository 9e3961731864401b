"""Tests of the plug-ins in real servers of SGLang and vLLM on a CPU: `make test-servers`."""
