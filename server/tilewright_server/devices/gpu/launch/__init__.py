"""Programs of stages on a stream: arguments, graphs and launches."""
