"""Access over the network: TLS, principals and their roles, and the gate that every call passes."""
