"""Sessions: what one client owns in the server, for as long as its lease."""
