"""Copying of segments between device and host memory: kernels and their CPU references.

The package handles addresses only and knows nothing of tiercache.
"""
