"""Costs of a model: the bytes that it caches and the FLOPs that a hit saves, from its Hugging Face config.

Reading order: `profile` (the result, and configs of well-known models), `architecture` (the sum over layers),
`layers` (one layer from the fields of a config), `costs` (the formulas), `layer_kinds` (the kind of each
layer), `fields` (validated reading).
"""
