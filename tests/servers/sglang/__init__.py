"""Tests of the storage backend in a real server of SGLang."""
