"""Commands about problems: declarations by which operations appear in `run`, `explain`, `bench` and `demo`."""
