"""The command `tiercache bench device`: copies between a CUDA device and page-locked host memory.

Each copy of many objects is compared with one contiguous copy of as many bytes.

Reading order: `plan` (the objects to copy), `run`, `copying` and `overlap` (the cases). The cases use
`ground` (memory and streams), `bed` (a model's pools in that memory), `rows`, `show`.
"""
