"""Commands around a running server: serve, stop, health, live counters, measurements."""
