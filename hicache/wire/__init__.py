"""The gRPC messages of hicached: generated, see `make stubs`."""
