"""From the start to the end of the process: warm start, signals, reload, the service manager."""
