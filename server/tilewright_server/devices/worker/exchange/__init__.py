"""The exchange between a server and a worker: packets, shared area, copies, descriptions."""
