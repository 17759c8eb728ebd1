"""Plain values: specifications of arrays, element types, arguments, reports."""
