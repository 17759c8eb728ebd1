"""Ways into the service: gRPC, the local socket and the Open Inference Protocol; conversions of their messages."""
