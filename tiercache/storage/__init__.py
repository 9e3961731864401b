"""Where objects go when the host has no room: the contract, what turns v2 calls into it, and how a store is opened.

Read `base` (the contract), `hybrid` (storage v2), `registry` (opening one); then what stores are made of: `env`, `vectors`, `checksum`,
`residents`, `gate`.
"""
