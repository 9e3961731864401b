"""Integrations with inference engines: plug-ins for SGLang and vLLM, and a worker over transformers."""
