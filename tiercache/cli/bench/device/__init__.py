"""`tiercache bench device`: copies between a CUDA device and page-locked host memory, each beside one contiguous copy of as many bytes.

Read `plan` and `shapes` (what is copied), `run`, `copying`, `matmul`, `overlap` and `start` (the cases); then what these are made of:
`ground` (memory and streams), `bed` (a model's pools on it), `products` (what computes beside), `rows`, `show`.
"""
