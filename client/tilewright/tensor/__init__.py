"""Arrays of callers: recognised, described, shared with the server or resident in it."""
