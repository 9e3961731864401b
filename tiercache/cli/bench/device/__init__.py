"""`tiercache bench device`: copies between a CUDA device and page-locked host memory, each beside one contiguous copy of as many bytes.

Reading order: `plan` and `shapes` (the objects to copy), `run`, `copying`, `matmul`, `overlap` and `start` (the cases); then their parts:
`ground` (memory and streams), `bed` (the pools of a model in it), `products` (computing beside copies), `rows`, `show`.
"""
