"""The gRPC face of the service: thin servicers, conversions, one table of errors, and the server that carries them."""
