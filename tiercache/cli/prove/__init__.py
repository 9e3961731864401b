"""`tiercache prove`: whether a prompt really comes back from storage, asked of a running engine over HTTP.

Read `command` (the options), `run` (the order of the requests) and `verdict` (what the answers mean); then `server` (HTTP with limits),
`completion` (one streamed answer), `engines` (what SGLang and vLLM have where), `prompt`, `saved`, `show`.
"""
