"""From a prepared plan and addresses to a result: admission, workspace, checks and launches."""
