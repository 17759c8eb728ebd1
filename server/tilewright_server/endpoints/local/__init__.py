"""The local socket: descriptors and fast launches for clients on the same machine. See ``local.proto``."""
