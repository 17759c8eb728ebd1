"""Commands about problems: run, explain, bench."""
