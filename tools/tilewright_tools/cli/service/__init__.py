"""Commands around a server: serve, doctor, cache, settings, plugins, archs, measurements."""
