"""Planning and running: from an operation request and addresses to a result in memory."""
