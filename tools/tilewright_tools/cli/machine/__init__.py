"""Commands about this machine and this installation: architectures, plugins, settings, the artifact cache, doctor."""
