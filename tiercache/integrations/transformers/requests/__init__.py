"""Requests of the reference worker: how they are admitted, computed step by step, kept, and given turns."""
