"""The verb `tiercache prove`, which tests over HTTP whether a running engine restores a prompt from storage.

Order of reading: `command` (the options), `run` (the order of the requests, and the one that is saved),
`verdict` (the meaning of the answers), `server` (HTTP with limits), `completion` (one streamed answer),
`engines` (differences between SGLang and vLLM), `show` (the output).
"""
