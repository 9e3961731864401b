"""Copying segments between device and host memory: kernels, and their reference twins. Knows addresses only, nothing of tiercache."""
