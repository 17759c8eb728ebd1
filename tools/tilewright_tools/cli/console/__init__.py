"""Parts of every command: options, groups, output and exit codes."""
