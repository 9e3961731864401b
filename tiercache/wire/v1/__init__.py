"""Generated from `proto/tiercache/wire/v1` by `make proto`; not edited by hand."""
