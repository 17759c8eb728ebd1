"""Reading requests: attributes, operands, outputs; and describing problems as requests."""
