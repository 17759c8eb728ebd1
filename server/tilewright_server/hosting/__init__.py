"""The server in its surroundings: limits of the system, logs, metrics, probes, the service manager."""
