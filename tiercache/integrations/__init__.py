"""Integrations with inference engines: SGLang, vLLM, and a reference worker over Hugging Face transformers."""
