"""Integrations with inference engines: plug-ins for SGLang and vLLM, and a worker over transformers.

Principles:

1. A store that fails is a miss and a line in the log, never an exception in the engine's thread.
2. A fact that decides over bytes is read from the engine or required, never assumed.
3. What cannot be restored exactly is refused when the engine starts.
"""
