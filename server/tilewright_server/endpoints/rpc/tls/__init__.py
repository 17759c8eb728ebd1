"""TLS before gRPC: a process that terminates it, and the server's side of that process."""
