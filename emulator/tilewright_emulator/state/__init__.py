"""State of the waves of a launch: registers, accesses under way, publication of stores."""
