"""Memory that clients hand over: sessions, shared-memory regions, resident buffers, and their binding to operands."""
