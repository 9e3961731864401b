"""Costs of a model: the bytes that it caches and the FLOPs that a hit saves, from its Hugging Face config.

Principles:

1. Figures follow from the model's config alone; no weights are read.
2. A config that is not understood is refused by the name of its field, never guessed at.
3. Each layer is counted by itself, and the model is their sum.

Reading order: `profile` (the result, and configs of well-known models), `architecture` (the kinds of layers,
and the sum over them), `layers` (the cost of one layer), `fields` (validated reading).
"""
