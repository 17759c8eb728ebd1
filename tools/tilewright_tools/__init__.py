"""Tools around the service: the command line, tuning and static analysis."""
