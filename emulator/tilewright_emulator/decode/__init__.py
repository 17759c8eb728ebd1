"""From an instruction's text to the step that executes it."""
